"""Turns arguments of a client into messages, and messages into what a client returns."""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from draftbridge.errors import CallError
from draftbridge.v1 import bridge_pb2, sampling_pb2

Event: TypeAlias = bridge_pb2.GenerateStarted | bridge_pb2.GenerateDelta | bridge_pb2.GenerateFinished

# Three decades; gRPC counts nanoseconds since 1970 in 64 bits.
_MAX_TIMEOUT_SECONDS = 1e9
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True)
class Generation:
    """A complete generation: its text, its ids in the target's vocabulary, and the stream's first and last event."""

    text: str
    token_ids: tuple[int, ...]
    started: bridge_pb2.GenerateStarted
    finished: bridge_pb2.GenerateFinished

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Generation":
        """Collects the events of a stream that ends well."""
        text: list[str] = []
        ids: list[int] = []
        started = finished = None
        for event in events:
            if isinstance(event, bridge_pb2.GenerateDelta):
                text.append(event.text)
                ids += event.token_ids
            elif isinstance(event, bridge_pb2.GenerateStarted):
                started = event
            else:
                finished = event
        assert started is not None and finished is not None, "a stream that ends well has both"
        return cls("".join(text), tuple(ids), started, finished)


def generate_request(
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
    token_ids: Sequence[int] | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    json_schema: str | Mapping[str, Any] | None = None,
    json_object: bool = False,
    regex: str | None = None,
    choice: str | Sequence[str] | None = None,
    grammar: str | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    target: str = "",
    draft: str = "",
    speculation: str = "auto",
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    draft_temperature: float | None = None,
    sources: str | Sequence[str] = (),
    tenant: str = "",
    drafts: str | Sequence[str] = (),
    workload: str = "",
) -> bridge_pb2.GenerateRequest:
    """Returns the request that `generate` and `stream` send. Give exactly one of `prompt`, `messages` and `token_ids`.

    Parameters without a description here are those of `GenerateRequest` in the contract.
    `messages`: mappings with "role", "content" and further fields for the chat template, such as "tool_calls", beside
    which the content may be None.
    `template_variables`: further JSON values for the chat template, such as `tools`; allowed only with `messages`.
    `json_schema`: JSON text or a mapping. At most one of `json_schema`, `json_object`, `regex`, `choice` and `grammar`
    may be given. `stop`, `choice`, `sources`, `drafts`: one string or several. `speculation`: "auto", "off", "lockstep"
    or "opportunistic".
    `sources`: names of the sources that may propose candidates, "grammar", "draft", "suffix" and "learned"; empty for
    all that the mode uses.
    Raises `CallError` for a value that does not fit its field.
    """
    modes = bridge_pb2.Speculation.Mode
    mode = f"MODE_{str(speculation).upper()}"
    if mode not in modes.keys() or mode == "MODE_UNSPECIFIED":
        allowed = "auto, off, lockstep or opportunistic"
        raise invalid("speculation", f"speculation must be {allowed}, got {speculation!r}")
    given = [value is not None for value in (prompt, messages, token_ids)]
    if sum(given) != 1:
        raise invalid("input", f"give exactly one of prompt, messages and token_ids, got {sum(given)}")
    constraint = _constraint(json_schema, json_object, regex, choice, grammar)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": logit_bias,
        "min_tokens": min_tokens,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": ignore_eos,
        "seed": seed,
    }
    speculation_fields: dict[str, Any] = {
        "num_assistant_tokens": num_assistant_tokens,
        "assistant_confidence_threshold": assistant_confidence_threshold,
        "draft_temperature": draft_temperature,
        "sources": _strings(sources),
    }
    others: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": _strings(stop),
        "logprobs": logprobs,
        "target": target,
        "draft": draft,
        "tenant": tenant,
        "drafts": _strings(drafts),
        "workload": workload,
    }
    try:
        request = bridge_pb2.GenerateRequest(
            sampling=sampling_pb2.SamplingParameters(**sampling, **constraint),
            speculation=bridge_pb2.Speculation(mode=modes.Value(mode), **speculation_fields),
            **others,
        )
        if prompt is not None:
            request.prompt = prompt
        if messages is not None:
            request.chat.CopyFrom(_chat(messages))
        if template_variables is not None:
            if messages is None:
                raise invalid("template_variables", "template_variables need messages: give both or neither")
            try:
                request.chat.template_variables_json = _json(template_variables)
            except (ValueError, TypeError) as error:
                raise _unfit("template_variables", template_variables, error) from error
        if token_ids is not None:
            request.token_ids.CopyFrom(bridge_pb2.TokenIds(token_ids=token_ids))
    except (ValueError, TypeError, KeyError) as error:
        integers: dict[str, tuple[object, int]] = {
            "top_k": (top_k, 32),
            "min_tokens": (min_tokens, 32),
            "seed": (seed, 64),
            "max_tokens": (max_tokens, 32),
            "logprobs": (logprobs, 32),
            "num_assistant_tokens": (num_assistant_tokens, 32),
        }
        for name, (value, bits) in integers.items():
            if isinstance(value, int) and not 0 <= value < 1 << bits:
                raise invalid(name, f"{name} must be between 0 and {2**bits - 1}, got {value}") from error
        for name, ids in (
            ("logit_bias", logit_bias),
            ("stop_token_ids", stop_token_ids),
            ("token_ids", token_ids),
        ):
            for id_ in ids if isinstance(ids, Iterable) else ():
                if isinstance(id_, int) and not 0 <= id_ < 1 << 32:
                    raise invalid(name, f"{name} must hold ids between 0 and {2**32 - 1}, got {id_}") from error
        for message, given_fields in (
            (sampling_pb2.SamplingParameters, sampling | constraint),
            (bridge_pb2.Speculation, speculation_fields),
            (bridge_pb2.GenerateRequest, others | {"prompt": prompt}),
            (bridge_pb2.TokenIds, dict[str, Any](token_ids=token_ids)),
        ):
            for name, one in given_fields.items():
                try:
                    message(**{name: one})
                except (ValueError, TypeError, KeyError) as problem:
                    raise _unfit(name, one, problem) from error
        raise invalid(
            "request", f"a value is missing or has the wrong type ({error}): see draftbridge.messages.generate_request"
        ) from error
    return request


def _constraint(
    json_schema: str | Mapping[str, Any] | None,
    json_object: bool,
    regex: str | None,
    choice: str | Sequence[str] | None,
    grammar: str | None,
) -> dict[str, Any]:
    """Returns the field of `SamplingParameters` that constrains the text, if there is one."""
    try:
        schema = json.dumps(json_schema) if isinstance(json_schema, Mapping) else json_schema
    except (ValueError, TypeError) as error:
        raise _unfit("json_schema", json_schema, error) from error
    try:
        texts = None if choice is None else sampling_pb2.Choice(texts=_strings(choice))
    except (ValueError, TypeError) as error:
        raise _unfit("choice", choice, error) from error
    given: dict[str, Any] = {
        "json_schema": schema,
        "json_object": json_object or None,
        "regex": regex,
        "choice": texts,
        "grammar": grammar,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise invalid(next(iter(found)), f"give at most one of {', '.join(given)}, got {' and '.join(found)}")
    return found


def _strings(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _chat(messages: Sequence[Mapping[str, Any]]) -> bridge_pb2.Chat:
    chat = bridge_pb2.Chat()
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        try:
            fields = {key: value for key, value in message.items() if key not in ("role", "content")}
            if message["content"] is None and not fields.get("tool_calls"):
                raise TypeError("content is None")
            chat.messages.add(role=message["role"], content=message["content"], fields_json=_json(fields))
        except UnicodeEncodeError as error:
            raise _unfit(name, message, error) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            form = 'a mapping with a text as "role", one as "content" (None only beside "tool_calls"), and JSON values'
            raise invalid(name, f"{name} must be {form}, got {reprlib.repr(message)} ({error})") from error
    return chat


def _unfit(field: str, value: object, error: Exception) -> CallError:
    """Returns the error of a value that its field cannot hold, given the one that its conversion raised."""
    if isinstance(error, UnicodeEncodeError):
        problem = f"{field} is not valid UTF-8, or has lone surrogates ({error.reason})"
        return invalid(field, f"{problem}: send UTF-8 without lone surrogates")
    problem = f"{field} has the wrong type or a value that does not fit, got {reprlib.repr(value)}"
    return invalid(field, f"{problem}: see draftbridge.messages.generate_request")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), ensure_ascii=False, allow_nan=False) if value else ""


def invalid(field: str, message: str) -> CallError:
    """Returns the error of an argument that cannot be sent."""
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, {"field": field})


def event_of(response: bridge_pb2.GenerateResponse) -> Event:
    """Returns the event that a response carries."""
    match response.WhichOneof("event"):
        case "started":
            return response.started
        case "delta":
            return response.delta
        case _:
            return response.finished


def translate_request(
    text: str | None, token_ids: Sequence[int] | None, source: str, target: str
) -> bridge_pb2.TranslateRequest:
    """Returns the message for `translate`. Raises `CallError` if an argument cannot be sent."""
    if (text is None) == (token_ids is None):
        raise invalid("input", "give exactly one of text and token_ids")
    try:
        if text is not None:
            return bridge_pb2.TranslateRequest(text=text, source=source, target=target)
        return bridge_pb2.TranslateRequest(
            token_ids=bridge_pb2.TokenIds(token_ids=token_ids), source=source, target=target
        )
    except (ValueError, TypeError) as error:
        raise invalid("request", f"a value has the wrong type or is out of range ({error})") from error


def checked_timeout(timeout: float | None) -> float | None:
    """Returns the seconds as gRPC takes them: None if they are more than it can count, which would be over at once.

    Raises `CallError` if it is not a number.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)) or timeout != timeout:
        raise invalid("timeout", f"timeout must be a number of seconds or None, got {timeout!r}")
    return timeout if timeout < _MAX_TIMEOUT_SECONDS else None


def checked_id(request_id: str) -> str:
    """Returns the id of a request as it is. Raises `CallError` if it cannot be one."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise invalid("request_id", "request_id must be 1 to 64 ASCII letters, digits and _.:-")
    return request_id
