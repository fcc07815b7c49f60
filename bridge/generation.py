"""A request's life in the bridge, from what the user asked to the text that they get.

1. `check` the request against the target.
2. Render it in the target's tokens, and in the draft's (`templates`).
3. Start a `Tape` with the target's ids, and open the sources that may propose candidates.
4. `speculate` (`loop`) runs sources and target, and commits what the target produces.
5. `TextStream` turns committed bytes into text, and finds the stop strings.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

from bridge.errors import (
    DraftBridgeError,
    EmptyPrompt,
    InvalidField,
    MaxTokensTooLarge,
    PromptTooLong,
    TokenOutOfRange,
)
from bridge.loop import speculate
from bridge.models import Model
from bridge.planning.estimates import DraftEstimates, RequestEstimates, TargetEstimates
from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.ports import Drafter, FinishReason, Logprob, Verifier
from bridge.sampling import SamplingParameters
from bridge.sources import SOURCES
from bridge.sources.chain import SourceChain
from bridge.sources.source import CandidateSource, Opening, Outcome
from bridge.statistics import Statistics
from bridge.suffix_memory import SuffixMemory
from bridge.tape import Tape
from bridge.target_link import TargetLink
from bridge.templates import Chat, end_of_turn, render_chat, render_ids_for, render_text_for
from bridge.text import TextStream
from bridge.vocabulary import Rendering

_log = logging.getLogger(__name__)

MAX_STOP_STRINGS = 64
MAX_TENANT_LENGTH = 256
_OVERDUE = "the draft did not answer in time; the target no longer waits for it"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Request:
    """What a user asks. `input`: a text, a chat, or ids of the target. `tenant`: who may know the output."""

    input: str | Chat | tuple[int, ...]
    sampling: SamplingParameters = SamplingParameters()
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    speculation: SpeculationParameters = SpeculationParameters()
    tenant: str = ""


@dataclass(frozen=True)
class Started:
    """The request was understood."""

    prompt_token_count: int


@dataclass(frozen=True)
class Span:
    """Bytes of a text and the source that proposed them; the empty name stands for the target itself."""

    source: str
    byte_count: int


@dataclass(frozen=True)
class Delta:
    """More text, and the ids committed since the last delta. `spans` say who proposed the text, piece by piece."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[Logprob] = ()
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end."""

    finish_reason: FinishReason
    prompt_token_count: int
    generated_token_count: int
    generated_byte_count: int
    elapsed_ns: int
    first_token_ns: int
    mode: Mode
    statistics: Statistics


def check(request: Request) -> None:
    """Raises `InvalidField` or `EmptyPrompt` for what no target could do."""
    request.sampling.checked()
    if not (request.input.messages if isinstance(request.input, Chat) else request.input):
        raise EmptyPrompt
    texts = [request.input] if isinstance(request.input, str) else []
    if isinstance(request.input, Chat):
        texts = [text for one in request.input.messages for text in (one.role, one.content)]
    if any(_SURROGATE.search(text) for text in texts):
        raise InvalidField("the prompt", "Unicode text", "a lone surrogate")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidField("max_tokens", "at least 1", request.max_tokens)
    if request.max_tokens is not None and request.sampling.min_tokens > request.max_tokens:
        raise InvalidField(
            "sampling.min_tokens", f"at most max_tokens, {request.max_tokens}", request.sampling.min_tokens
        )
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidField("stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(request.stop)} strings")
    if "" in request.stop:
        raise InvalidField("stop", "made of non-empty strings", "an empty one")
    if request.logprobs is not None and request.logprobs > 100:
        raise InvalidField("logprobs", "at most 100", request.logprobs)
    assistant_tokens = request.speculation.num_assistant_tokens
    if assistant_tokens is not None and not 1 <= assistant_tokens <= 64:
        raise InvalidField("speculation.num_assistant_tokens", "between 1 and 64", assistant_tokens)
    temperature = request.speculation.draft_temperature
    if temperature is not None and not 0.0 <= temperature <= 100.0:
        raise InvalidField("speculation.draft_temperature", "between 0 and 100", temperature)
    threshold = request.speculation.assistant_confidence_threshold
    if not 0.0 <= threshold <= 1.0:
        raise InvalidField("speculation.assistant_confidence_threshold", "between 0 and 1", threshold)
    if unknown := set(request.speculation.sources) - set(SOURCES):
        raise InvalidField("speculation.sources", f"made of {', '.join(SOURCES)}", ", ".join(sorted(unknown)))
    if len(request.tenant) > MAX_TENANT_LENGTH:
        raise InvalidField("tenant", f"at most {MAX_TENANT_LENGTH} characters long", len(request.tenant))


def render(request: Request, model: Model, source: Model) -> Rendering:
    """The request's input in `model`'s tokens. `source` is the target, whose ids an input of ids is in."""
    match request.input:
        case str(text):
            return render_text_for(model, text, source)
        case Chat():
            return render_chat(model, request.input)
        case ids:
            return render_ids_for(model, ids, source)


def _room(request: Request, model: Model, prompt_ids: Sequence[int]) -> int:
    """Tokens to generate; raises where they do not fit."""
    count, context = len(prompt_ids), model.context_length
    for id_ in prompt_ids:
        if not model.has(id_):
            raise TokenOutOfRange(id_, model.vocabulary.size, model.name)
    if count == 0:
        raise EmptyPrompt
    if count >= context:
        raise PromptTooLong(count, context, model.name)
    if request.max_tokens is not None and request.max_tokens > context - count:
        raise MaxTokensTooLarge(request.max_tokens, count, context, model.name)
    return request.max_tokens or context - count


async def generate(
    request: Request,
    model: Model,
    target: Verifier,
    draft_model: Model | None = None,
    draft: Drafter | None = None,
    estimates: TargetEstimates | None = None,
    memory: SuffixMemory | None = None,
    clock: Callable[[], int] = perf_counter_ns,
) -> AsyncIterator[Started | Delta | Finished]:
    """The target's own continuation of the request; the draft, if any, only makes it faster.

    `estimates`: what other requests have learned about the target, to which this one adds. `memory`: earlier outputs
    of tenants, which a request with a tenant uses and adds to. `clock` gives nanoseconds.
    """
    started = clock()
    check(request)
    request.sampling.checked(model.has)
    # Encoding a long prompt takes a while in which other requests want to go on.
    prompt = await asyncio.to_thread(render, request, model, model)
    max_tokens = _room(request, model, prompt.ids)
    estimates = estimates or TargetEstimates(model.forward_costs)
    sources, note = await asyncio.to_thread(_open, request, model, prompt, draft_model, draft, estimates, memory, clock)
    yield Started(len(prompt.ids))

    draft_estimates = _draft_estimates(estimates, draft_model, model)
    planner = Planner(request.speculation, RequestEstimates(estimates, sources, draft_estimates))
    tape, text, statistics = Tape(model.vocabulary, prompt.ids), _AttributedText(request.stop), Statistics()
    end_id = await asyncio.to_thread(_end_id, request, model)
    chain = SourceChain(sources, model, tape, end_id)
    link = TargetLink(target, model, tape, max_tokens, clock)
    finish_reason: FinishReason | None = None
    first_token_ns = sent = sent_bytes = 0
    passes = speculate(target, link, chain, planner, statistics, clock)
    async with aclosing(passes):
        with _remembered(tape, memory, request.tenant):
            async for outcome in passes:
                first_token_ns = first_token_ns or clock() - started
                finish_reason = outcome.result.finish_reason
                if finish_reason is not FinishReason.STOP and tape.generated_token_count == request.max_tokens:
                    finish_reason = FinishReason.LENGTH
                delta = text.push(outcome, final=finish_reason is not None)
                sent += len(delta.token_ids)
                sent_bytes += sum(map(len, outcome.data[: len(delta.token_ids)]))
                yield delta
                if text.stopped:
                    finish_reason = FinishReason.STOP
                    break
    assert finish_reason is not None, "the loop ends with a reason or an error"
    statistics.finish(sources)
    statistics.plan_summary = planner.summary(chain.state)
    statistics.note = note or chain.note or (_OVERDUE if chain.state and chain.state.overdue else "")
    yield Finished(
        finish_reason=finish_reason,
        prompt_token_count=len(prompt.ids),
        generated_token_count=sent,
        generated_byte_count=sent_bytes,
        elapsed_ns=clock() - started,
        first_token_ns=first_token_ns,
        mode=Mode.OFF if chain.empty else planner.mode,
        statistics=statistics,
    )


def _draft_estimates(estimates: TargetEstimates, draft: Model | None, target: Model) -> DraftEstimates | None:
    if draft is None:
        return None
    return estimates.draft(draft.name, draft.forward_costs, competes=draft.competes_with(target))


def _end_id(request: Request, model: Model) -> int | None:
    """The target's id for a draft's end of text: where the target is in a chat, that is the end of its turn."""
    return end_of_turn(model) if isinstance(request.input, Chat) else next(iter(model.special_ids.eos), None)


def _open(
    request: Request,
    model: Model,
    prompt: Rendering,
    draft_model: Model | None,
    draft: Drafter | None,
    estimates: TargetEstimates,
    memory: SuffixMemory | None,
    clock: Callable[[], int],
) -> tuple[list[CandidateSource], str]:
    """The sources that the request allows, and why one of them is missing."""
    parameters, draft_prompt, note = request.speculation, None, ""
    if draft_model is not None and parameters.allows("draft", takes_time=True):
        try:
            draft_prompt = render(request, draft_model, model)
        except DraftBridgeError as error:  # a draft's template may refuse what the target's takes
            note = f"the draft could not take the request ({error}); the target went on without it"
    opening = Opening(
        prompt=model.vocabulary.spell(prompt.ids),
        drafter=draft,
        draft_model=draft_model,
        draft_prompt=draft_prompt,
        draft_times=_draft_estimates(estimates, draft_model, model),
        confidence_threshold=parameters.assistant_confidence_threshold,
        memory=memory,
        tenant=request.tenant,
        clock=clock,
    )
    if parameters.mode is Mode.OFF:
        return [], note
    opened = [open_source(opening) for name, open_source in SOURCES.items() if name in (parameters.sources or SOURCES)]
    return [one for one in opened if one and parameters.allows(one.name, takes_time=one.state is not None)], note


@contextmanager
def _remembered(tape: Tape, memory: SuffixMemory | None, tenant: str) -> Iterator[None]:
    """Keeps the output for the tenant's next requests, also if this one fails or is given up."""
    try:
        yield
    finally:
        if memory and tenant:
            memory.remember(tenant, tape.data)


class _AttributedText:
    """Turns passes into text, and remembers who proposed the bytes that are held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._text = TextStream(stop)
        self._held: list[Span] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._text.stopped

    def push(self, outcome: Outcome, *, final: bool) -> Delta:
        """A pass as text, up to the token that completes a stop string. An end of text is not part of it."""
        result, text, count = outcome.result, "", 0
        ended = result.finish_reason is FinishReason.STOP
        for place, data in enumerate(outcome.data):
            count += 1
            if ended and count == len(outcome.data):
                break
            accepted = place < result.accepted_token_count
            self._held.append(Span(outcome.tried.sources[place] if accepted else "", len(data)))
            text += self._text.push(data)
            if self.stopped:
                break
        if final and not self.stopped:
            text += self._text.push(b"", final=True)
        return Delta(text, result.token_ids[:count], result.logprobs[:count], self._spans(len(text.encode())))

    def _spans(self, byte_count: int) -> tuple[Span, ...]:
        """Who proposed the next bytes of the text."""
        spans: list[Span] = []
        while byte_count and self._held:
            source, count = self._held[0].source, min(self._held[0].byte_count, byte_count)
            byte_count -= count
            left = self._held.pop(0).byte_count - count
            if left:
                self._held.insert(0, Span(source, left))
            if spans and spans[-1].source == source:
                count += spans.pop().byte_count
            if count:
                spans.append(Span(source, count))
        if byte_count:  # a replacement character is longer than the byte that it stands for
            spans.append(Span("", byte_count))
        return tuple(spans)
