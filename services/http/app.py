"""The application of the HTTP door: its paths, and the steps of a request.

1. The body is received, up to a limit of bytes and time, and checked (`requests`).
2. Its choices run on the gateway, or on a bridge elsewhere, as requests over gRPC do (`generation`).
3. What they yield is written in OpenAI's form (`responses`); errors have a form of their own (`errors`). A stream's
   status is sent with its first text, so that an error before it can have its own status.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from bridge.errors import DraftBridgeError, EmptyPrompt, ModelNotFound
from bridge.generation import Delta
from bridge.request import Request
from services.bridge.backend import Backend, ServedModel
from services.http import errors
from services.http.answer import Answer, Limits, respond
from services.http.generation import Event, Sequences, generate
from services.http.insight import Insight
from services.http.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest, SegmentationRequest
from services.http.responses import ChatFormat, Choice, CompletionFormat, Format, Json
from services.logs import REQUEST_ID_KEY
from services.rpc.keys import Key, Keys

R = TypeVar("R", bound=GenerationRequest)
B = TypeVar("B", bound=BaseModel)

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
    middleware = [
        Middleware(Insight, metrics=backend.metrics, traces=backend.traces),
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
    ]
    if origins:
        methods, exposed = ["GET", "POST"], ["Retry-After", REQUEST_ID_KEY]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=methods,
                allow_headers=["*"],
                expose_headers=exposed,
            )
        )

    async def page(request: HttpRequest) -> Response:
        return await static.get_response("index.html", request.scope)

    async def on_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, DraftBridgeError)
        return errors.answer(error, model=request.path_params.get("name", ""))

    async def on_http_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return errors.answer_to_http_error(error)

    async def on_bug(request: HttpRequest, error: Exception) -> Response:
        return errors.answer(DraftBridgeError("an internal error occurred; see the server's log"))

    static = _Static(directory=_STATIC)
    completions = _Endpoint(door, CompletionRequest, CompletionFormat, "prompt")
    chats = _Endpoint(door, ChatCompletionRequest, ChatFormat, "messages")
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
        exception_handlers={DraftBridgeError: on_error, HTTPException: on_http_error, Exception: on_bug},
    )


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
        self.sequences = Sequences(limits.sequences)
        self._created = int(time.time())

    def key_of(self, request: HttpRequest) -> Key | None:
        """Returns the key of a request, None if the server has no keys. Raises `Unauthenticated`."""
        return self._keys.find(request.headers.get("authorization")) if self._keys else None

    async def read(self, request: HttpRequest, kind: type[B]) -> B:
        """Returns the request. Raises `InvalidBody`, or `HTTPException` for a body that is not read."""
        content_type, _, _ = request.headers.get("content-type", "").partition(";")
        # Other types can be sent by any web page without the browser asking this server first.
        if content_type.strip().lower() != "application/json":
            raise HTTPException(415, "send the body as application/json, with that Content-Type")
        limits, body = self.limits, bytearray()
        too_large = HTTPException(413, f"the body may have at most {limits.body_bytes} bytes: shorten the prompt")
        if int(request.headers.get("content-length", 0)) > limits.body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limits.body_bytes:
                        raise too_large
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            raise errors.invalid_body(error) from None

    async def models(self, request: HttpRequest) -> Response:
        """Lists the targets, which `model` may name, and under our name the drafts."""
        self.key_of(request)
        targets, drafts = await self.backend.served()
        ours = {"drafts": [{"id": name} for name in drafts]}
        return JSONResponse({"object": "list", "data": [self._listed(one) for one in targets], "draftbridge": ours})

    async def model(self, request: HttpRequest) -> Response:
        """Describes one target."""
        self.key_of(request)
        return JSONResponse(self._listed(await self.backend.served_target(request.path_params["name"])))

    async def segmentation(self, request: HttpRequest) -> Response:
        """Returns the tokens that one or two models make of a text, each with its bytes as far as they are text."""
        self.key_of(request)
        body = await self.read(request, SegmentationRequest)
        try:
            rows = zip(body.models, await self.backend.segment(body.text, body.models), strict=True)
        except ModelNotFound as error:
            return errors.answer(error, model=error.metadata.get("model", ""))
        data = [
            {
                "model": name,
                "tokens": [
                    {"id": id_, "text": data.decode(errors="replace"), "byte_count": len(data)} for id_, data in tokens
                ],
            }
            for name, tokens in rows
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: HttpRequest) -> Response:
        """Asks every model service. 503 if a target cannot be used."""
        found = await self.backend.check()
        failed = any(one.is_target and one.problem for one in found)
        services = [{"address": one.address, "problem": one.problem or None} for one in found]
        return JSONResponse({"status": "error" if failed else "ok", "services": services}, 503 if failed else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        """Serves the Prometheus metrics of this process, to holders of a key if the server has keys."""
        self.key_of(request)
        write, content_type = choose_encoder(request.headers.get("accept", ""))
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
    """One of the two endpoints that generate, as an ASGI application. `prompt` names the field with the input."""

    def __init__(self, door: _Door, kind: type[R], form: type[Format], prompt: str) -> None:
        self._door, self._kind, self._form, self._prompt = door, kind, form, prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: R | None = None
        try:
            request = HttpRequest(scope, receive)
            key = self._door.key_of(request)
            body = await self._door.read(request, self._kind)
            if not body.choice_count:
                raise EmptyPrompt
            with self._door.sequences.take(body.choice_count), key.request() if key else nullcontext():
                requests = [_owned(one, key) for one in body.requests()]
                model = await self._door.backend.served_target(body.model)
                choices = [Choice(index, request, model) for index, request in enumerate(requests)]
                form = self._form(model, spans=body.draftbridge.spans)
                events = _spending(generate(self._door.backend, requests, body.model, body.draftbridge.wish), key)
                async with aclosing(events):
                    response = await respond(Answer(form, choices, events), body, self._door.limits, receive)
                    if response:
                        await response(scope, receive, send)
        except (ClientDisconnect, asyncio.CancelledError):
            # Only a server that stops cancels a request. Its connection is closed, because the response is incomplete.
            pass
        except DraftBridgeError as error:
            response = errors.answer(error, model=body.model if body else "", prompt=self._prompt)
            await response(scope, receive, send)


def _owned(request: Request, key: Key | None) -> Request:
    """Keeps the tenants of one key apart from those of another, as the gRPC server does."""
    return replace(request, tenant=f"{key.name}/{request.tenant}") if key and request.tenant else request


async def _spending(events: AsyncGenerator[Event], key: Key | None) -> AsyncGenerator[Event]:
    """Passes events on, and counts their tokens for the key."""
    async with aclosing(events):
        async for event in events:
            if key and isinstance(event[1], Delta):
                key.spend(len(event[1].token_ids))
            yield event
