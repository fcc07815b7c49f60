"""Writes what the gateway yields as objects of OpenAI's protocol, with fields of ours under the name `draftbridge`."""

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from bridge.generation import Delta, Finished
from bridge.ports import FinishReason
from bridge.request import Request
from services.bridge.backend import Opened, ServedModel
from services.http.tools import Call

Json = dict[str, Any]

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTEXT_FULL: "length"}


class Choice:
    """One choice of an answer: collects its events. `call`: the call of a tool that its text spells, if it must."""

    def __init__(self, index: int, request: Request, model: ServedModel, call: Call | None = None) -> None:
        self.index, self.call = index, call
        self.opened: Opened | None = None
        self.finished: Finished | None = None
        self._spelling = model.spelling
        self._ends = request.sampling.ends(model.eos)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # as the text was decoded
        self._character_count = 0

    def take(self, event: Opened | Delta | Finished) -> None:
        """Keeps the first and the last event."""
        match event:
            case Opened():
                self.opened = event
            case Finished():
                self.finished = event

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, if it has ended."""
        if self.finished and self.call and self.call.is_whole:
            return "tool_calls"
        return _FINISH[self.finished.finish_reason] if self.finished else None

    def tokens(self, delta: Delta) -> list[Json]:
        """Returns the tokens of a delta that has log probabilities, in the form of chats."""
        entries = []
        for id_, one in zip(delta.token_ids, delta.logprobs, strict=False):
            if id_ in self._ends:
                continue
            entry = self._token(id_, one.logprob)
            entry["top_logprobs"] = [self._token(*top) for top in one.top]
            entries.append(entry)
        return entries

    def place(self, token: Json) -> int:
        """Returns the offset of the next token in the text, in characters: after one that the token completes."""
        begun, _ = self._decoder.getstate()
        offset = self._character_count + bool(begun)
        self._character_count += len(self._decoder.decode(bytes(token["bytes"])))
        return offset

    def _token(self, id_: int, logprob: float) -> Json:
        data = self._spelling.token_bytes(id_)
        return {"token": self._token_name(id_, data), "logprob": logprob, "bytes": list(data)}

    def _token_name(self, id_: int, data: bytes) -> str:
        """Returns a token's text, or its bytes in OpenAI's form, as `bytes:\\xe2`, if they are not a text."""
        try:
            return data.decode() or self._spelling.name(id_)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def statistics(self) -> Json:
        """Returns the choice's entry in `usage.draftbridge`; names are those of SpeculationStatistics in the contract.

        It includes `seed`, which gives this choice again.
        """
        assert self.opened and self.finished, "the choice has ended"
        finished = self.finished
        return {
            "index": self.index,
            "target": self.opened.target,
            "draft": self.opened.draft,
            "seed": self.opened.seed,
            "mode": finished.mode.value,
            "generated_byte_count": finished.generated_byte_count,
            "elapsed_ns": finished.elapsed_ns,
            "first_token_ns": finished.first_token_ns,
            **finished.statistics.reported,
        }


def usage(choices: Sequence[Choice], choices_per_prompt: int) -> Json:
    """Returns the token counts of all choices. A prompt counts once, however many choices it has."""
    ended = [one.finished for one in choices if one.finished]
    prompts = ended[::choices_per_prompt]
    prompt_tokens = sum(one.prompt_token_count for one in prompts)
    completion_tokens = sum(one.generated_token_count for one in ended)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.statistics.cached_token_count for one in prompts)},
        "draftbridge": [one.statistics() for one in choices],
    }


class Format(ABC):
    """Writes one answer of an endpoint. With `spans`, a stream reports who proposed each piece of the text.

    A delta with progress reports it, too.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: ServedModel, *, spans: bool = False) -> None:
        self._id = self.prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._model, self._spans = model.name, spans

    def whole(self) -> Json:
        """Returns the answer to a request without streaming, except for its choices and usage."""
        return self._envelope(self.whole_object)

    def event(self, choices: Sequence[Json], **further: Any) -> Json:
        """Returns one event of a stream."""
        return {**self._envelope(self.chunk_object), "choices": list(choices), **further}

    def _envelope(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def chunk(self, choice: Choice, delta: Delta) -> Json | None:
        """Returns the part of an event that adds a delta to a choice; None if there is nothing to send yet."""
        tokens = choice.tokens(delta) if delta.logprobs else []
        if not (delta.text or tokens or delta.progress):
            return None
        part = self._chunk(choice, delta.text, tokens)
        ours: Json = {}
        if self._spans:
            ours["spans"] = [vars(span) for span in delta.spans]
        if delta.progress:
            ours["progress"] = delta.progress.reported
        return part | {"draftbridge": ours} if ours else part

    @abstractmethod
    def first(self, choice: Choice) -> Json | None:
        """Returns the part that begins a choice in a stream, if there is one."""

    @abstractmethod
    def last(self, choice: Choice) -> Json:
        """Returns the part that ends a choice in a stream."""

    @abstractmethod
    def _chunk(self, choice: Choice, text: str, tokens: list[Json]) -> Json: ...

    @abstractmethod
    def complete(self, choice: Choice, text: str) -> Json:
        """Returns a choice of an answer without streaming, except for its log probabilities."""

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: list[Json]) -> Json:
        """Returns the log probabilities of the choice's next tokens: fields that are lists or null."""


class CompletionFormat(Format):
    """Writes answers of `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def first(self, choice: Choice) -> Json | None:
        """See `Format`."""
        return None

    def last(self, choice: Choice) -> Json:
        """See `Format`."""
        return self._chunk(choice, "", [])

    def complete(self, choice: Choice, text: str) -> Json:
        """See `Format`."""
        return {"index": choice.index, "text": text, "finish_reason": choice.finish_reason}

    def _chunk(self, choice: Choice, text: str, tokens: list[Json]) -> Json:
        return {**self.complete(choice, text), "logprobs": self.logprobs(choice, tokens) if tokens else None}

    def logprobs(self, choice: Choice, tokens: list[Json]) -> Json:
        """See `Format`."""
        return {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            # The chosen token is always there, as in OpenAI's answers.
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in [*one["top_logprobs"], one]} for one in tokens
            ],
            "text_offset": [choice.place(one) for one in tokens],
        }  # fmt: skip


class ChatFormat(Format):
    """Writes answers of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self, choice: Choice) -> Json | None:
        """See `Format`."""
        return self._part(choice, {"role": "assistant", "content": None if choice.call else ""}, [])

    def last(self, choice: Choice) -> Json:
        """See `Format`."""
        return self._part(choice, choice.call.take("", ended=True) if choice.call else {}, [])

    def complete(self, choice: Choice, text: str) -> Json:
        """See `Format`."""
        message: Json = {
            "role": "assistant",
            "content": None if choice.call else text,
            "refusal": None,
            "annotations": [],
        }
        if choice.call:
            message |= choice.call.take(text, ended=True)
            for one in message.get("tool_calls", ()):
                del one["index"]  # only pieces of a stream have it
        return {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}

    def logprobs(self, choice: Choice, tokens: list[Json]) -> Json:
        """See `Format`."""
        return {"content": tokens, "refusal": None}

    def _chunk(self, choice: Choice, text: str, tokens: list[Json]) -> Json:
        return self._part(choice, choice.call.take(text, ended=False) if choice.call else {"content": text}, tokens)

    def _part(self, choice: Choice, delta: Json, tokens: list[Json]) -> Json:
        logprobs = self.logprobs(choice, tokens) if tokens else None
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish_reason}
