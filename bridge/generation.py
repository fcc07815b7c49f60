"""A request's life in the bridge, from what the user asked to the text that they get.

1. `check` the request against the target.
2. Render it in the target's tokens, and in the draft's (`templates`).
3. Start a `Tape` with the target's ids.
4. `Speculation` runs draft and target and commits what the target says.
5. `TextStream` turns committed bytes into text, and sees the stop strings.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from time import perf_counter_ns

from bridge.errors import (
    EmptyPrompt,
    InvalidField,
    MaxTokensTooLarge,
    PromptTooLong,
    TokenOutOfRange,
)
from bridge.estimates import Estimates
from bridge.lead import Lead
from bridge.models import Model
from bridge.policy import Mode, Policy, SpeculationParameters
from bridge.ports import Drafter, FinishReason, Logprob, Pass, Verifier
from bridge.sampling import SamplingParameters
from bridge.speculation import Speculation, Statistics
from bridge.suffix_memory import SuffixMemory, suffix_drafter
from bridge.tape import Tape
from bridge.templates import Chat, end_of_turn, render_chat, render_ids_for, render_text_for
from bridge.text import TextStream
from bridge.vocabulary import Rendering

_log = logging.getLogger(__name__)

MAX_STOP_STRINGS = 64
MAX_TENANT_LENGTH = 256
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


class Source(Enum):
    """Who proposed candidates."""

    NOBODY = "nobody"
    DRAFT = "draft"
    TEXT = "text"


@dataclass(frozen=True)
class Delta:
    """More text, and the ids committed since the last delta.

    About the first `accepted_byte_count` bytes of it were proposed, the first of those by `source`, and the last
    `suffix_byte_count` of those by the text.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[Logprob] = ()
    accepted_byte_count: int = 0
    source: Source = Source.NOBODY
    suffix_byte_count: int = 0


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
    estimates: Estimates | None = None,
    memory: SuffixMemory | None = None,
) -> AsyncIterator[Started | Delta | Finished]:
    """The target's own continuation of the request; the draft, if any, only makes it faster.

    `estimates`: what is known of the target from other requests, and learns from this one. `memory`: what tenants were
    told before; a request with a tenant uses and adds to it.
    """
    started = perf_counter_ns()
    check(request)
    request.sampling.checked(model.has)
    # Encoding a long prompt takes a while in which others want to go on.
    prompt = await asyncio.to_thread(render, request, model, model)
    max_tokens = _room(request, model, prompt.ids)
    estimates = estimates or Estimates()
    lead, trial, note = None, None, ""
    if draft_model is not None and draft is not None:
        try:
            rendering = await asyncio.to_thread(render, request, draft_model, model)
            lead = Lead(draft_model, rendering, request.speculation.assistant_confidence_threshold)
            trial = estimates.trial(draft_model.name)
        except Exception as error:  # a draft's template may refuse what the target's takes
            _log.warning("the draft cannot take a request that the target takes: %s", error)
            draft, note = None, f"the draft could not take the request ({error}); the target went on alone"
    policy = Policy(request.speculation, estimates, trial)
    suffix = None
    if policy.automatic:
        said = model.vocabulary.spell(prompt.ids)
        suffix = await asyncio.to_thread(suffix_drafter, said, memory, request.tenant)
    yield Started(len(prompt.ids))

    tape = Tape(model.vocabulary, prompt.ids)
    text = TextStream(request.stop)
    # A draft's end of text is the end of a turn where the target is in one.
    end = end_of_turn(model) if isinstance(request.input, Chat) else None
    speculation = Speculation(model, tape, target, draft, lead, policy, end, suffix)
    speculation.statistics.note = note
    finish_reason: FinishReason | None = None
    first_token_ns = sent = sent_bytes = 0
    async with aclosing(speculation.run(max_tokens)) as passes, _learnt(policy, tape, memory, request.tenant):
        async for event in passes:
            first_token_ns = first_token_ns or perf_counter_ns() - started
            finish_reason = event.finish_reason
            if finish_reason is not FinishReason.STOP and sent + len(event.token_ids) == request.max_tokens:
                finish_reason = FinishReason.LENGTH
            ended = event.finish_reason is FinishReason.STOP
            delta = _delta(model, text, event, ended, final=finish_reason is not None)
            sent += len(delta.token_ids)
            sent_bytes += len(model.vocabulary.spell(delta.token_ids))
            yield _attributed(model, delta, event, speculation.from_text)
            if text.stopped:
                finish_reason = FinishReason.STOP
                break
    speculation.statistics.choice = policy.choice
    assert finish_reason is not None, "the loop ends with a reason or an error"
    yield Finished(
        finish_reason=finish_reason,
        prompt_token_count=len(prompt.ids),
        generated_token_count=sent,
        generated_byte_count=sent_bytes,
        elapsed_ns=perf_counter_ns() - started,
        first_token_ns=first_token_ns,
        mode=Mode.OFF if speculation.alone and suffix is None else policy.mode,
        statistics=speculation.statistics,
    )


@asynccontextmanager
async def _learnt(policy: Policy, tape: Tape, memory: SuffixMemory | None, tenant: str) -> AsyncIterator[None]:
    """What the next requests have of this one, also if it fails or is given up: costs, and the tenant's text."""
    try:
        yield
    finally:
        policy.close()
        if memory and tenant:
            memory.remember(tenant, tape.data)


def _attributed(model: Model, delta: Delta, event: Pass, from_text: int) -> Delta:
    """With what of it candidates said, of which the last `from_text` were the text's."""
    count, length = event.accepted_token_count, len(delta.text.encode())
    drafted, accepted = (
        min(len(model.vocabulary.spell(event.token_ids[:end])), length) for end in (count - from_text, count)
    )
    if accepted == 0:
        return delta
    source = Source.DRAFT if drafted else Source.TEXT
    return replace(delta, accepted_byte_count=accepted, source=source, suffix_byte_count=accepted - drafted)


def _delta(model: Model, text: TextStream, event: Pass, ended: bool, final: bool) -> Delta:
    """A pass as text, up to the token that completes a stop string. `ended`: its last token ends the text, unsaid."""
    said = ""
    for count, id_ in enumerate(event.token_ids, start=1):
        if not (ended and count == len(event.token_ids)):
            said += text.push(model.vocabulary.token_bytes(id_))
        if text.stopped:
            return Delta(said, event.token_ids[:count], event.logprobs[:count])
    if final:
        said += text.push(b"", final=True)
    return Delta(said, event.token_ids, event.logprobs)
