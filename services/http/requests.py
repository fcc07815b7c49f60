"""Requests of OpenAI's protocol, with the fields of ours, as values that are checked when they are read.

A field that is not supported is refused by its name. Fields that only describe what is done anyway accept that value.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from bridge.errors import InvalidField
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from bridge.text.chat import Chat, Message
from services.bridge.pairing import Wish
from services.http.tools import call_grammar

# OpenAI's default for `max_tokens` of completions. Chats have no limit but the context.
_COMPLETION_TOKENS = 16
# Seeds that the server draws are exact in JavaScript, whose numbers have 53 bits.
_DRAWN_SEED_BITS = 53

T = TypeVar("T")


class _FirstErrorOnly(FailFast):
    """Checks a list up to its first error: a body can hold millions. Hashable, as alternatives of a type have to be."""

    def __hash__(self) -> int:
        return hash(type(self))


List = Annotated[tuple[T, ...], _FirstErrorOnly()]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Extension(_Strict):
    """The field `draftbridge` of a request: how to speculate. It never changes the text."""

    mode: Mode = Mode.AUTO
    draft: str = ""
    drafts: List[str] = ()
    workload: str = ""
    sources: List[str] = ()
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float = 0.0
    draft_temperature: float | None = None
    tenant: str = ""
    spans: bool = False
    progress: bool = False
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
        return Wish.of(self.draft, self.drafts, self.workload)

    @property
    def speculation(self) -> SpeculationParameters:
        """The parameters in the bridge's form."""
        return SpeculationParameters(
            mode=self.mode,
            num_assistant_tokens=self.num_assistant_tokens,
            assistant_confidence_threshold=self.assistant_confidence_threshold,
            draft_temperature=self.draft_temperature,
            sources=self.sources,
        )


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(_Strict, ABC):
    """The fields that both kinds of requests have. Null is the same as leaving a field out."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: List[TokenId] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | List[str] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Identifies the end user for statistics that this server does not keep; no answer depends on it.
    user: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    draftbridge: Extension = Extension()

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream reports the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choice_count(self) -> int:
        """The number of requests that `requests` returns. Raises `InvalidField`."""
        return len(self._inputs()) * (self.n or 1)

    def requests(self) -> list[Request]:
        """Returns a request for each choice: `n` for each prompt, with consecutive seeds. Raises `InvalidField`."""
        if self.stream_options and not self.stream:
            raise InvalidField("stream_options", "left out unless stream is true", "it")
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
            speculation=self.draftbridge.speculation,
            tenant=self.draftbridge.tenant,
            reports_progress=bool(self.stream) and self.draftbridge.progress,
        )
        count = self.n or 1
        return [
            replace(base, input=one, seed=(seed + place) % (1 << 64))
            for one in self._inputs()
            for place in range(count)
        ]

    @abstractmethod
    def _inputs(self) -> Sequence[str | Chat | tuple[int, ...]]: ...

    def _grammar(self) -> Grammar | None:
        return self.draftbridge.constraint

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


class SegmentationRequest(_Strict):
    """Body of `/v1/segmentations`: a text, and the names of one or two models."""

    text: str
    models: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]


class TextPart(_Strict):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message. Its further fields, such as `tool_calls`, go to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    role: str
    content: str | List[TextPart] | None = None

    def message(self) -> Message:
        """Returns the message in the bridge's form; its parts of text become lines."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return Message(self.role, text, self.model_extra or {})


class JsonSchema(_Strict):
    """A named schema, which is obeyed strictly even if `strict` is false. `name` and `description` have no effect."""

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar in the bridge's form. Raises `InvalidField`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidField("response_format.json_schema", "given with type json_schema only", self.type)
        if self.json_schema:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.json_schema.json_schema))
        return Grammar(GrammarKind.JSON_OBJECT) if self.type == "json_object" else None


class ToolName(_Strict):
    """The function that must be called."""

    name: str


class NamedTool(_Strict):
    """Chooses a function that must be called."""

    type: Literal["function"]
    function: ToolName


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: List[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: List[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    modalities: List[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def _inputs(self) -> Sequence[str | Chat | tuple[int, ...]]:
        variables = dict(self.chat_template_kwargs or {})
        if self.tools and self.tool_choice != "none":
            if "tools" in variables:
                raise InvalidField("chat_template_kwargs", "without tools, which have a field of their own", "tools")
            variables["tools"] = list(self.tools)
        return (Chat(tuple(one.message() for one in self.messages), variables),)

    def _grammar(self) -> Grammar | None:
        choice, tools = self.tool_choice, self.tools or ()
        formatted, extended = self.response_format and self.response_format.grammar, super()._grammar()
        if formatted and extended:
            raise InvalidField("response_format", "text if draftbridge has a grammar", "JSON")
        formatted = formatted or extended
        if choice == "required" or isinstance(choice, NamedTool):
            if formatted:
                raise InvalidField("response_format", "text if a tool must be called", "JSON")
            return call_grammar(tools, choice.function.name if isinstance(choice, NamedTool) else None)
        for place, tool in enumerate(tools if choice != "none" else ()):
            if isinstance(function := tool.get("function"), dict) and function.get("strict"):
                allowed = 'false unless tool_choice is "required" or names a function'
                raise InvalidField(f"tools[{place}].function.strict", allowed, "true")
        return formatted

    def _max_tokens(self) -> int | None:
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidField("max_tokens", "left out where max_completion_tokens is given", self.max_tokens)
        return next(iter(limits), None)

    def _logprob_count(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("top_logprobs", "left out unless logprobs is true", self.top_logprobs)
        return (self.top_logprobs or 0) if self.logprobs else None
