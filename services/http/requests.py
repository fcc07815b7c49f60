"""Requests of OpenAI's protocol, with the fields of ours, as values that are checked when they are read.

A field that is not supported is refused by its name. Fields that only describe what is done anyway accept that value.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from bridge.errors import InvalidField
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from bridge.text.chat import Chat, measured
from bridge.text.json_objects import count_marks
from services.bridge.pairing import Wish
from services.http.errors import InvalidBody, invalid_body
from services.http.fields import MAX_TOKEN_IDS, Count, JsonObject, List, Strict, TokenId
from services.http.messages import ChatMessage
from services.http.tools import NamedTool, Tool, call_grammar

B = TypeVar("B", bound=BaseModel)

# OpenAI's default for `max_tokens` of completions. Chats have no limit but the context.
_COMPLETION_TOKENS = 16
# OpenAI's limit for chats. Completions have the bridge's own.
_MAX_CHAT_TOP_LOGPROBS = 20
_MAX_SEGMENTED_CHARACTERS = 64 << 10
# In a body, see `count_marks`. All streams stand still while it is parsed: for 2 us for each, and 0.1 us for an id.
_MAX_MARKS, _IDS_PER_MARK = 1 << 15, 32
# Seeds that the server draws are exact in JavaScript, whose numbers have 53 bits.
_DRAWN_SEED_BITS = 53


def read_body(kind: type[B], body: bytes) -> B:
    """Returns the request of a body. Raises `InvalidBody`."""
    if sum(map(body.count, (b",", b"[", b"{"))) > _MAX_MARKS:
        number_count, mark_count = count_marks(body)
        mark_count += number_count // _IDS_PER_MARK if issubclass(kind, CompletionRequest) else number_count
        if mark_count > _MAX_MARKS:
            found = f"{mark_count} commas, [ and {{ outside of its texts, and at most {_MAX_MARKS} are read"
            raise InvalidBody(f"the body has {found}: send fewer messages, tools or prompts in one request", None)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


class Extension(Strict):
    """The field `draftbridge` of a request: how to speculate, and the form of the text."""

    mode: Mode | None = None
    draft: str | None = None
    drafts: List[str] | None = None
    workload: str | None = None
    sources: List[str] | None = None
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float | None = None
    draft_temperature: float | None = None
    tenant: str | None = None
    spans: bool | None = None
    progress: bool | None = None
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None

    @property
    def constraint(self) -> Grammar | None:
        """The grammar in the bridge's form. Raises `InvalidField`."""
        given = [
            Grammar(GrammarKind.REGEX, self.regex) if self.regex is not None else None,
            Grammar.choice(self.choice) if self.choice is not None else None,
            Grammar(GrammarKind.LARK, self.grammar) if self.grammar is not None else None,
        ]
        found = [one for one in given if one]
        if len(found) > 1:
            raise InvalidField("draftbridge", "with at most one of regex, choice and grammar", f"{len(found)} of them")
        return next(iter(found), None)

    @property
    def wish(self) -> Wish:
        """The draft that the request asks for. Raises `InvalidField`."""
        return Wish.of(self.draft or "", self.drafts or (), self.workload or "")

    @property
    def speculation(self) -> SpeculationParameters:
        """The parameters in the bridge's form."""
        return SpeculationParameters(
            mode=self.mode or Mode.AUTO,
            num_assistant_tokens=self.num_assistant_tokens,
            assistant_confidence_threshold=self.assistant_confidence_threshold or 0.0,
            draft_temperature=self.draft_temperature,
            sources=self.sources or (),
        )


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Strict, ABC):
    """The fields that both kinds of requests have."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(max_length=MAX_TOKEN_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[List[TokenId], Field(max_length=MAX_TOKEN_IDS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | List[str] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These identify the end user and the request for statistics and caches that this server does not keep by them; no
    # answer depends on them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: JsonObject | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    draftbridge: Extension | None = None

    @property
    def extension(self) -> Extension:
        """The field `draftbridge`, also if it is left out."""
        return self.draftbridge or Extension()

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream reports the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choice_count(self) -> int:
        """The number of requests that `requests` returns. Raises `InvalidField`."""
        return self._input_count() * (self.n or 1)

    def requests(self) -> list[Request]:
        """Returns a request for each choice: `n` for each prompt, with consecutive seeds. Raises `InvalidField`.

        A chat of megabytes takes some tenths of a second.
        """
        ours = self.extension
        streamed = {
            "stream_options": self.stream_options,
            "draftbridge.spans": ours.spans,
            "draftbridge.progress": ours.progress,
        }
        for name, value in streamed.items():
            if value and not self.stream:
                raise InvalidField(name, "left out unless stream is true")
        seed = secrets.randbits(_DRAWN_SEED_BITS) if self.seed is None else self.seed
        base = Request(
            input="",
            sampling=SamplingParameters(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=self.logit_bias or {},
                min_tokens=self.min_tokens or 0,
                stop_token_ids=self.stop_token_ids or (),
                ignore_eos=bool(self.ignore_eos),
                grammar=self._grammar(),
            ),
            max_tokens=self._max_tokens(),
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
            logprobs=self._logprob_count(),
            speculation=ours.speculation,
            tenant=ours.tenant or "",
            reports_progress=bool(ours.progress),
        )
        count = self.n or 1
        return [
            replace(base, input=one, seed=(seed + place) % (1 << 64))
            for one in self._inputs()
            for place in range(count)
        ]

    @abstractmethod
    def _input_count(self) -> int: ...

    @abstractmethod
    def _inputs(self) -> Sequence[str | Chat | tuple[int, ...]]: ...

    @property
    def names(self) -> dict[str, str]:
        """The names in this request of the bridge's fields that it may refuse."""
        return {"the draft": "draftbridge.drafts"} if self.extension.drafts else {}

    def _grammar(self) -> Grammar | None:
        return self.extension.constraint

    @abstractmethod
    def _max_tokens(self) -> int | None: ...

    @abstractmethod
    def _logprob_count(self) -> int | None: ...


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: str | List[TokenId] | List[str] | List[List[TokenId]]
    logprobs: Count | None = None
    best_of: Count | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def names(self) -> dict[str, str]:
        """See `GenerationRequest`."""
        return super().names | {"the prompt": "prompt"}

    def _input_count(self) -> int:
        return len(self._inputs())

    def _inputs(self) -> Sequence[str | Chat | tuple[int, ...]]:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidField("best_of", "the same as n or left out", self.best_of)
        prompt: Any = self.prompt
        several = isinstance(prompt, tuple) and prompt and not isinstance(prompt[0], int)
        return prompt if several else (prompt,)

    def _max_tokens(self) -> int | None:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def _logprob_count(self) -> int | None:
        return self.logprobs


class SegmentationRequest(Strict):
    """Body of `/v1/segmentations`: a text, and the names of one or two models."""

    text: Annotated[str, Field(max_length=_MAX_SEGMENTED_CHARACTERS)]
    models: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]


class JsonSchema(Strict):
    """A named schema, which is obeyed strictly even if `strict` is false. `name` and `description` have no effect."""

    name: str
    description: str | None = None
    json_schema: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar in the bridge's form. Raises `InvalidField`."""
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidField("response_format.json_schema", "given with type json_schema", "none")
        if self.json_schema:
            if self.type != "json_schema":
                raise InvalidField("response_format.json_schema", "left out unless type is json_schema", self.type)
            if self.json_schema.json_schema is None:
                raise InvalidField("response_format.json_schema.schema", "a JSON Schema", "none")
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.json_schema.json_schema))
        return Grammar(GrammarKind.JSON_OBJECT) if self.type == "json_object" else None


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: List[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_CHAT_TOP_LOGPROBS)] | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: List[Literal["text"]] | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def demands_call(self) -> bool:
        """Whether the text must be the call of a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def names(self) -> dict[str, str]:
        """See `GenerationRequest`."""
        return super().names | {
            "the prompt": "messages",
            "max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
            "sampling.json_schema": "tools" if self.demands_call else "response_format.json_schema",
        }

    def _input_count(self) -> int:
        return 1

    def _inputs(self) -> Sequence[str | Chat | tuple[int, ...]]:
        variables = dict(self.chat_template_kwargs or {})
        if self.tools and self.tool_choice != "none":
            if "tools" in variables:
                raise InvalidField("chat_template_kwargs", "without tools, which have a field of their own", "tools")
            variables["tools"] = [one.model_dump(mode="json", exclude_none=True) for one in self.tools]
        messages = tuple(one.message(f"messages[{place}]") for place, one in enumerate(self.messages))
        return (measured(Chat(messages, variables)),)

    def _grammar(self) -> Grammar | None:
        choice, tools = self.tool_choice, self.tools or ()
        formatted, extended = self.response_format and self.response_format.grammar, super()._grammar()
        if formatted and extended:
            raise InvalidField("response_format", "text if draftbridge has a grammar", "JSON")
        if self.demands_call:
            if extended:
                raise InvalidField("draftbridge", "without a grammar if a tool must be called", extended.kind.value)
            if formatted:
                raise InvalidField("response_format", "text if a tool must be called", "JSON")
            # One call is made, whatever `parallel_tool_calls` is.
            return call_grammar(tools, choice.function.name if isinstance(choice, NamedTool) else None)
        free = tools if choice != "none" else ()
        if free and self.parallel_tool_calls is False:
            allowed = 'true unless tool_choice is "required" or names a function'
            raise InvalidField("parallel_tool_calls", allowed, "false")
        for place, tool in enumerate(free):
            if tool.function.strict:
                allowed = 'false unless tool_choice is "required" or names a function'
                raise InvalidField(f"tools[{place}].function.strict", allowed, "true")
        return formatted or extended

    def _max_tokens(self) -> int | None:
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidField(
                "max_completion_tokens", "left out where max_tokens is given", self.max_completion_tokens
            )
        return next(iter(limits), None)

    def _logprob_count(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("top_logprobs", "left out unless logprobs is true", self.top_logprobs)
        return (self.top_logprobs or 0) if self.logprobs else None
