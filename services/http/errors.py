"""Reports errors in OpenAI's form: a status and `{"error": {"message", "type", "param", "code"}}`."""

import asyncio
import logging
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.errors import DraftBridgeError, InvalidField, InvalidGrammar, InvalidRequest, Unreachable
from services.errors import Exhausted, GrammarNotSupported
from services.http.fields import is_unknown
from services.quoting import clipped
from services.rpc.status import RemoteError, code_of, retry_seconds

_log = logging.getLogger(__name__)

# The HTTP status that google/rpc/code.proto documents for each gRPC code.
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Clients of OpenAI's protocol look for this code to shorten a prompt.
_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded", "MAX_TOKENS_TOO_LARGE": "context_length_exceeded"}
# The names of the bridge's fields in this protocol. A name that is not here stays.
_PREFIXES = {"sampling.": "", "speculation.": "draftbridge.", "open.": "", "chat.": ""}
_NAMES = {
    "the prompt": "prompt",
    "the draft": "draftbridge.draft",
    "drafts": "draftbridge.drafts",
    "tenant": "draftbridge.tenant",
    "workload": "draftbridge.workload",
    "chat.template_variables_json.tools": "tools",
    "chat.template_variables_json": "chat_template_kwargs",
    "sampling.json_schema": "response_format.json_schema",
    "sampling.json_object": "response_format.type",
    "sampling.regex": "draftbridge.regex",
    "sampling.choice": "draftbridge.choice",
    "sampling.grammar": "draftbridge.grammar",
}
_NO_NAMES: dict[str, str] = {}
# A size that pydantic asks for, such as "Tuple should have at least 1 item after validation, not 0".
_SIZE = re.compile(r"(?P<kind>\w+) should have (?P<size>at \w+ \d+ \w+)\b.*")
_KINDS = {"String": "a string", "Dictionary": "an object"}
# Elements of a validation error's place that name an alternative of a union instead of a field.
_ALTERNATIVE = re.compile(
    r"str|int|float|bool|none|(tuple|dict|literal)\[.*|(constrained|function)-.*|NamedTool|\[key\]"
)
# How an error names a part of a tool's parameters: see `call_grammar`.
_TOOL = re.compile(r"tools .*? at (#/\$defs/(\d+))")
_MAX_NAME_CHARACTERS = 100
# With more errors in one body, the first one is not worth the memory of all.
_MAX_ERRORS = 1000


class InvalidBody(InvalidRequest, reason="INVALID_BODY"):
    """The body is not JSON, lacks a field, or has a field that is unknown or of the wrong type."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message, **({"field": param} if param else {}))


# Errors whose metadata names a field of the request.
_WITH_FIELD = (InvalidField, InvalidGrammar, InvalidBody, GrammarNotSupported, RemoteError)


class TooManySequences(Exhausted, reason="TOO_MANY_SEQUENCES"):
    """The HTTP door generates as many choices as it may."""

    def __init__(self, limit: int) -> None:
        remedy = "ask for a smaller n, or start it with a larger --http-sequences (`draftbridge http`: --sequences)"
        super().__init__(f"this server generates at most {limit} choices at once", remedy, limit=limit)


class LogprobsFull(Exhausted, reason="LOGPROBS_FULL"):
    """The log probabilities of answers that are not streamed leave no room for more."""

    def __init__(self, limit_bytes: int) -> None:
        problem = f"the log probabilities of answers that are not streamed fill the {limit_bytes} bytes for them"
        remedy = "ask for fewer of them, or stream the answer"
        super().__init__(problem, remedy, limit_bytes=limit_bytes)


class ServerStopping(Unreachable, reason="SERVER_STOPPING"):
    """The grace period of a server that stops is over, and the answer is not complete."""

    def __init__(self) -> None:
        problem = "this server is stopping and cannot finish the request"
        remedy = "when it runs again, or send it to another one"
        DraftBridgeError.__init__(self, f"{problem}: try again {remedy}", retry_seconds=1.0)


def invalid_body(error: ValidationError) -> InvalidBody:
    """Converts the first of pydantic's errors."""
    if error.error_count() > _MAX_ERRORS:
        return InvalidBody(
            f"the body has {error.error_count()} unsupported fields or invalid values: leave them out", None
        )
    found = error.errors(include_url=False)
    # A field of several types has an error for each. Those that are deepest in it belong to the type that was meant.
    place = _path(found[0]["loc"])
    paths = [path for one in found if (path := _path(one["loc"]))[: len(place)] == place]
    place = max(paths, key=_depth)
    same = [one for one in found if _path(one["loc"]) == place]
    first, param = same[0], _name(place)
    match first["type"]:
        case "json_invalid" if "hex escape" in first["ctx"]["error"]:
            text = f"the body has half of a surrogate pair ({first['ctx']['error']}): send whole characters"
        case "json_invalid":
            text = f"the body is not JSON ({first['ctx']['error']}): send one JSON object"
        case _ if is_unknown(first):
            text = f"{param} is not a supported parameter: leave it out"
        case "missing":
            text = f"{param} is missing: give it"
        case "literal_error" | "enum" | "none_required":
            expected = first.get("ctx", {}).get("expected", "null").replace("False", "false").replace("True", "true")
            text = f"{param} must be {expected}: other values are not supported"
        case _:
            allowed = dict.fromkeys(_allowed(one["msg"]) for one in same)
            text = f"{param or 'the body'} must be {' or '.join(allowed)}, got {reprlib.repr(first['input'])}"
    return InvalidBody(text, param)


def _path(place: Sequence[int | str]) -> tuple[int | str, ...]:
    """Returns the names and indices of a validation error's place in the body."""
    return tuple(one for one in place if not (isinstance(one, str) and _ALTERNATIVE.fullmatch(one)))


def _depth(path: Sequence[int | str]) -> tuple[int, int]:
    """Orders the places that the types of one field reached before their errors."""
    last = path[-1] if path else ""
    return len(path), last if isinstance(last, int) else -1


def _name(path: Sequence[int | str]) -> str | None:
    """Returns the name of a place in the body, as `messages[0].role`; None for the body itself."""
    names = "".join(f"[{element}]" if isinstance(element, int) else f".{element}" for element in path)
    return names.removeprefix(".")[:_MAX_NAME_CHARACTERS] or None


def _allowed(message: str) -> str:
    if found := _SIZE.fullmatch(message):
        return f"{_KINDS.get(found['kind'], 'a list')} with {found['size']}"
    return message.removeprefix("Input should be ").removeprefix("Input should ").partition(", unable")[0]


class ErrorAnswers:
    """Answers the requests to an application that it ends with an error, or that the server ends because it stops."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            await send(message)  # the first one may wait until an earlier answer of the connection was sent
            has_begun = True

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:  # while its body was being received
            pass
        except asyncio.CancelledError:
            # Only a server that stops cancels a request. A stream that has begun sends the error as its last event.
            if not has_begun:
                await answer(ServerStopping())(scope, receive, send)
        except Exception as error:
            if has_begun:
                raise  # the server closes the connection
            await answer(error)(scope, receive, send)


def answer(error: Exception, *, model: str = "", names: dict[str, str] = _NO_NAMES) -> JSONResponse:
    """Returns the response to a failed request. See `report`."""
    status, body, headers = report(error, model=model, names=names)
    return JSONResponse(body, status, headers)


def answer_to_http_error(error: HTTPException) -> JSONResponse:
    """Returns the response to an error that has no equivalent in gRPC, such as an unknown path."""
    code = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "body_too_large"}.get(error.status_code)
    return JSONResponse(_body(error.status_code, error.detail, None, code), error.status_code, error.headers)


def report(
    error: Exception, *, model: str = "", names: dict[str, str] = _NO_NAMES
) -> tuple[int, dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the status, the body and further headers for an error of a request.

    `model` is the request's, `names` has its own names of the bridge's fields. An error that is not a
    `DraftBridgeError` is logged and reported with a fixed text.
    """
    if not isinstance(error, DraftBridgeError):
        _log.error("unexpected error in a request", exc_info=error)
        error = DraftBridgeError("an internal error occurred; see the server's log")
    status = _STATUS.get(code_of(error).name, 500)
    headers = {}
    if seconds := retry_seconds(error.metadata):
        headers["Retry-After"] = str(seconds)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    field, param = _fields(error, model, _NAMES | names)
    text = str(error)
    if param and field and text.endswith(f" {field}"):
        text = text.removesuffix(field) + param
    if param and field and text.startswith(field):
        text = param + text.removeprefix(field)
        if param == "tools" and (found := _TOOL.match(text)):
            param = f"tools[{found[2]}].function.parameters"
            text = param + text.removeprefix("tools").replace(found[1], "#")
    return status, _body(status, text, param, _CODES.get(error.reason, error.reason.lower())), headers


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, dict[str, Any]]:
    type_ = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": clipped(message), "type": type_, "param": param, "code": code}}


def _fields(error: DraftBridgeError, model: str, names: dict[str, str]) -> tuple[str | None, str | None]:
    """Returns the bridge's name of the field that is wrong and its name in this protocol, or None."""
    match error.reason:
        case "EMPTY_PROMPT" | "PROMPT_TOO_LONG" | "TOKEN_OUT_OF_RANGE":
            return None, names["the prompt"]
        case "MAX_TOKENS_TOO_LARGE":
            return "max_tokens", names.get("max_tokens", "max_tokens")
        case "MODEL_NOT_FOUND" if not isinstance(error, RemoteError):
            return None, names.get("model", "model" if error.metadata.get("model") == model else names["the draft"])
        case "DRAFT_AWAY" | "PAIR_REFUSED":
            return None, names["the draft"]
    field = error.metadata.get("field") if isinstance(error, _WITH_FIELD) else None
    if not field:
        return None, None
    if isinstance(error, InvalidBody):  # which has the name in this protocol already
        return field, field
    for prefix, replacement in _PREFIXES.items():
        if field.startswith(prefix) and field not in names:
            return field, replacement + field.removeprefix(prefix)
    return field, names.get(field, field)
