"""The application of the HTTP door: its paths, and the steps of a request.

1. The body is received, up to a limit of bytes and of time for each part, and checked (`requests`).
2. Its choices run on the gateway, or on a bridge elsewhere, as requests over gRPC do (`generation`).
3. What they yield is written in OpenAI's form (`responses`); errors have a form of their own (`errors`). A stream's
   status is sent with its first text, or after 15 s without one: an error before that has its own status.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.errors import DraftBridgeError, EmptyPrompt, InvalidField
from bridge.generation import Delta
from bridge.request import Request, check_tenant
from bridge.threads import run, threads_for
from services.bridge.backend import Backend, ServedModel, ServiceState
from services.bridge.shared import Shared
from services.errors import ModelNotFound, Unauthenticated
from services.http import errors
from services.http.answer import Answer, Budget, Limits, WholeResponse, respond, write_text
from services.http.generation import Event, Sequences, generate
from services.http.insight import Insight
from services.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SegmentationRequest,
    read_body,
)
from services.http.responses import ChatFormat, Choice, CompletionFormat, Format, Json
from services.http.tools import Call
from services.logs import REQUEST_ID_KEY
from services.metrics import readable_accept
from services.rpc.keys import Key, Keys

R = TypeVar("R", bound=GenerationRequest)
B = TypeVar("B", bound=BaseModel)

# What all bodies in arrival may have in memory, apart from the beginning of each, so that short requests always arrive.
_MAX_ARRIVING_BYTES, _FREE_BYTES = 256 << 20, 64 << 10
# A body has its time limit for each part of this size, so that a slow client can send a large one.
_TIMED_BYTES = 1 << 20
_HEALTH_SECONDS = 1.0
_STATIC = Path(__file__).parent / "static"
# The page loads from this server only, and no other page may frame it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def application(
    backend: Backend,
    limits: Limits,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = ("*",),
    keys: Keys | None = None,
) -> Starlette:
    """Returns the application. `origins`: whose pages may use it. `hosts`: names by which requests may address it.

    With `keys`, what is below /v1 needs one of them as a bearer token.
    """
    door = _Door(backend, limits, keys)
    middleware = [Middleware(Insight, metrics=backend.metrics, traces=backend.traces)]
    if origins:
        methods, exposed = ["GET", "POST"], ["Retry-After", REQUEST_ID_KEY]
        # Outside of what answers errors: a browser shows a page no answer without these headers.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=methods,
                allow_headers=["*"],
                expose_headers=exposed,
            )
        )
    middleware += [Middleware(errors.ErrorAnswers), Middleware(_Hosts, names=list(hosts))]

    async def page(request: HttpRequest) -> Response:
        return await static.get_response("index.html", request.scope)

    async def on_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, DraftBridgeError)
        return errors.answer(error, model=request.path_params.get("name", ""))

    async def on_http_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return errors.answer_to_http_error(error)

    static = _Static(directory=_STATIC)
    completions = _Endpoint(door, CompletionRequest, CompletionFormat)
    chats = _Endpoint(door, ChatCompletionRequest, ChatFormat)
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/models", door.models),
            Route("/v1/models/{name:path}", door.model),
            Route("/v1/segmentations", door.segmentation, methods=["POST"]),
            Route("/health", door.health),
            Route("/metrics", door.metrics),
            Route("/", page),
            Mount("/static", static),
        ],
        middleware=middleware,
        exception_handlers={DraftBridgeError: on_error, HTTPException: on_http_error},
    )


class _Hosts:
    """Refuses requests that address the server by a name that is not one of `names`."""

    def __init__(self, app: ASGIApp, names: list[str]) -> None:
        self._app = app
        self._trusted = TrustedHostMiddleware(_accept, names, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app

        async def refuse(message: Message) -> None:
            nonlocal app
            remedy = "add it with --http-host, or in `draftbridge http` with --host"
            problem = f"the server does not know the name in the Host header: {remedy}"
            app = errors.answer_to_http_error(HTTPException(400, problem))

        await self._trusted(scope, receive, refuse)
        await app(scope, receive, send)


async def _accept(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers nothing: `_Hosts` calls the application itself."""


class _Static(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        """Adds the headers that keep the page from loading anything else."""
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


class _Door:
    """What the endpoints share, and the small ones of them."""

    def __init__(self, backend: Backend, limits: Limits, keys: Keys | None) -> None:
        self.backend, self.limits, self._keys = backend, limits, keys
        self._sequences, self.logprobs = Sequences(limits.sequences), Budget(limits.logprob_bytes)
        self._arriving_bytes = 0
        self._health: Shared[list[ServiceState]] = Shared(backend.check, _HEALTH_SECONDS)
        self._created = int(time.time())

    def key_of(self, request: HttpRequest) -> Key | None:
        """Returns the key of a request, None if the server has no keys. Raises `Unauthenticated`."""
        return self._keys.find(request.headers.get("authorization")) if self._keys else None

    @contextmanager
    def room(self, kind: type[BaseModel], count: int, key: Key | None) -> Iterator[None]:
        """Takes room for `count` generations, or segmentations, while the block runs.

        Raises `TooManySequences` or `KeyLimitReached`.
        """
        admitted: AbstractContextManager[None] = nullcontext()
        if key:
            admitted = key.request(count) if issubclass(kind, GenerationRequest) else key.segmentation(count)
        with self._sequences.take(count), admitted:
            yield

    def check_count(self, body: GenerationRequest, key: Key | None) -> None:
        """Raises `EmptyPrompt` or `InvalidField` for a number of choices that can never be generated at once."""
        count, limit = body.choice_count, self.limits.sequences
        if key and (allowed := key.settings.concurrent_requests):
            limit = min(limit, allowed)
        if not count:
            raise EmptyPrompt
        if count > limit:
            allowed_count = f"so small that this server may generate all choices at once, at most {limit}"
            raise InvalidField("n" if (body.n or 1) > 1 else "prompt", allowed_count, f"{count} choices")

    async def read(self, request: HttpRequest, kind: type[B], key: Key | None) -> tuple[B, int]:
        """Returns the request, and the number of bytes of its body.

        Raises `InvalidBody`, `HTTPException` for a body that is not read, and what `room` raises if there is none.
        """
        content_type, _, _ = request.headers.get("content-type", "").partition(";")
        # Other types can be sent by any web page without the browser asking this server first.
        if content_type.strip().lower() != "application/json":
            raise HTTPException(415, "send the body as application/json, with that Content-Type")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPException(415, "send the body uncompressed, without Content-Encoding")
        limits, body, counted, timed = self.limits, bytearray(), 0, 0
        budget = max(_MAX_ARRIVING_BYTES, 2 * limits.body_bytes)
        too_large = HTTPException(413, f"the body may have at most {limits.body_bytes} bytes: shorten the prompt")
        if int(request.headers.get("content-length", 0)) > limits.body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(limits.body_seconds) as timeout:
                async for piece in request.stream():
                    body += piece
                    if len(body) > limits.body_bytes:
                        raise too_large
                    if len(body) - timed >= _TIMED_BYTES:
                        timed = len(body)
                        timeout.reschedule(asyncio.get_running_loop().time() + limits.body_seconds)
                    further = max(len(body) - _FREE_BYTES, 0) - counted
                    counted += further
                    self._arriving_bytes += further
                    if further and self._arriving_bytes > budget:
                        raise HTTPException(503, "too many large bodies are arriving: try again", {"Retry-After": "1"})
        except TimeoutError:
            allowed = f"{limits.body_seconds:g} s for each MiB"
            raise HTTPException(408, f"the body did not arrive within {allowed}: send it faster") from None
        finally:
            self._arriving_bytes -= counted
        # Checked before the body, which can take some tenths of a second; the caller takes room for all choices.
        with self.room(kind, 1, key):
            threads, data = threads_for(len(body)), bytes(body)
            return await run(threads, read_body, kind, data) if threads else read_body(kind, data), len(body)

    async def models(self, request: HttpRequest) -> Response:
        """Lists the targets, which `model` may name, and under our name the drafts."""
        self.key_of(request)
        targets, drafts = await self.backend.served()
        ours = {"drafts": [{"id": name} for name in drafts]}
        return JSONResponse({"object": "list", "data": [self._listed(one) for one in targets], "draftbridge": ours})

    async def model(self, request: HttpRequest) -> Response:
        """Describes one target."""
        self.key_of(request)
        if not (name := request.path_params["name"]):
            raise HTTPException(404)
        return JSONResponse(self._listed(await self.backend.served_target(name)))

    async def segmentation(self, request: HttpRequest) -> Response:
        """Returns the tokens that one or two models make of a text, each with its bytes as far as they are text."""
        key = self.key_of(request)
        body, _ = await self.read(request, SegmentationRequest, key)
        try:
            with self.room(SegmentationRequest, 1, key):
                rows = await self.backend.segment(body.text, body.models)
                return await asyncio.to_thread(_segmented, body.models, rows)
        except ModelNotFound as error:
            return errors.answer(error, names={"model": "models"})

    async def health(self, request: HttpRequest) -> Response:
        """Asks every model service, at most once a second. 503 if no service of a target model can be used.

        Without a key that it needs, the answer has only the status.
        """
        found = await self._health.get()
        failed = any(one.is_missed for one in found)
        health: Json = {"status": "error" if failed else "ok"}
        with suppress(Unauthenticated):
            self.key_of(request)
            health["services"] = [{"address": one.address, "problem": one.problem or None} for one in found]
        return JSONResponse(health, 503 if failed else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        """Serves the Prometheus metrics of this process, to holders of a key if the server has keys."""
        self.key_of(request)
        write, content_type = choose_encoder(readable_accept(request.headers.get("accept", "")))
        text = await asyncio.to_thread(write, self.backend.metrics.registry)
        return Response(text, headers={"Content-Type": content_type})

    def _listed(self, model: ServedModel) -> Json:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "draftbridge",
            "max_model_len": model.context_length,
            "draftbridge": {"chat_template": model.chats},
        }


class _Endpoint(Generic[R]):
    """One of the two endpoints that generate, as an ASGI application."""

    def __init__(self, door: _Door, kind: type[R], form: type[Format]) -> None:
        self._door, self._kind, self._form = door, kind, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: R | None = None
        target = ""
        try:
            request = HttpRequest(scope, receive)
            key = self._door.key_of(request)
            body, byte_count = await self._door.read(request, self._kind, key)
            self._door.check_count(body, key)
            with self._door.room(self._kind, body.choice_count, key), self._door.logprobs.share() as take:
                target, ours = body.model or "", body.extension
                converted = await run(threads_for(byte_count), body.requests)
                requests = [_owned(one, key) for one in converted]
                model = await self._door.backend.served_target(target)
                target = model.name  # the default may change meanwhile, and the answer must be that of one model
                calls = isinstance(body, ChatCompletionRequest) and body.demands_call
                choices = [
                    Choice(index, request, model, Call() if calls else None) for index, request in enumerate(requests)
                ]
                form = self._form(model, spans=bool(ours.spans))
                events = generate(self._door.backend, requests, target, ours.wish)
                events = _spending(events, key) if key else events
                async with aclosing(events):
                    response = await respond(Answer(form, choices, events, take), body, receive)
                    if response:
                        await response(scope, receive, send)
        except DraftBridgeError as error:
            names = body.names if body else {}
            response = errors.answer(error, model=target, names=names)
            await response(scope, receive, send)


def _segmented(models: Sequence[str], rows: list[list[tuple[int, bytes]]]) -> Response:
    data = [
        {
            "model": name,
            "tokens": [
                {"id": id_, "text": data.decode(errors="replace"), "byte_count": len(data)} for id_, data in tokens
            ],
        }
        for name, tokens in zip(models, rows, strict=True)
    ]
    return WholeResponse(write_text({"object": "list", "data": data}).encode())


def _owned(request: Request, key: Key | None) -> Request:
    """Keeps the tenants of one key apart from those of another, as the gRPC server does. Raises `InvalidField`."""
    check_tenant(request.tenant, 0)
    return replace(request, tenant=f"{key.name}/{request.tenant}") if key and request.tenant else request


async def _spending(events: AsyncGenerator[Event], key: Key) -> AsyncGenerator[Event]:
    """Passes events on, and counts their tokens for the key."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event[1], Delta):
                key.spend(len(event[1].token_ids))
            yield event
