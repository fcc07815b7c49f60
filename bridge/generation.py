"""Serves one request, from the user's input to the generated text.

1. `check` the request against the target (`request`).
2. `render` it in the target's tokens, and in the draft's (`request`).
3. Open the sources that may propose candidates, and start a `Tape` with the target's ids.
4. `speculate` (`loop`) runs sources and target, and commits what the target produces.
5. `TextStream` (`text.stream`) turns committed bytes into text, and finds the stop strings.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import TypeAlias

from bridge.errors import DraftBridgeError
from bridge.loop import speculate
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import Mode, Planner
from bridge.ports import FinishReason, Logprob, TextGrammar, Verifier
from bridge.request import Request, check, render, rendering_threads, token_room
from bridge.sources import open_sources
from bridge.sources.draft import DraftSource, open_draft
from bridge.sources.ngrams import NgramMemory
from bridge.sources.source import DRAFT, Draft, Opening, Outcome
from bridge.sources.source_set import SourceSet
from bridge.statistics import Statistics
from bridge.tape import Tape
from bridge.target_link import TargetLink
from bridge.text.chat import Chat, end_of_turn
from bridge.text.models import Model
from bridge.text.stream import Span, TextStream
from bridge.text.vocabulary import Rendering
from bridge.threads import run, threads_for

# Returns another draft for the rest of a request, or None; see `generate`.
NextDraft: TypeAlias = Callable[[DraftBridgeError | None], Draft | None]
# The least time between two reports of a request's progress.
_PROGRESS_NS = 100_000_000
_OVERDUE = "the draft did not answer in time; the target no longer waits for it"


@dataclass(frozen=True)
class Started:
    """Reports that the request is valid and its generation begins."""

    prompt_token_count: int


@dataclass(frozen=True)
class Delta:
    """Carries new text and the ids committed since the last delta. `spans` name the source of each piece of text.

    `progress`: the statistics so far, which go on counting; set now and then if the request asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[Logprob] = ()
    spans: tuple[Span, ...] = ()
    progress: Statistics | None = None


@dataclass(frozen=True)
class Finished:
    """Reports the end of the text. The generated counts cover the tokens that were sent to the client."""

    finish_reason: FinishReason
    prompt_token_count: int
    generated_token_count: int
    generated_byte_count: int
    elapsed_ns: int
    first_token_ns: int
    mode: Mode
    statistics: Statistics


async def generate(
    request: Request,
    model: Model,
    target: Verifier,
    next_draft: NextDraft | None = None,
    estimates: Callable[[], TargetEstimates] | None = None,
    memory: NgramMemory | None = None,
    clock: Callable[[], int] = perf_counter_ns,
    statistics: Statistics | None = None,
    grammar: TextGrammar | None = None,
    started_ns: int | None = None,
) -> AsyncGenerator[Started | Delta | Finished, None]:
    """Yields the target's own continuation of the request; a draft only makes it faster.

    `next_draft(None)` returns the request's draft at the start and, later, a better one for the rest of the text, if
    there is one; `next_draft(error)` another one in place of a draft that failed. A draft is closed as soon as it is
    not used any more; the caller closes all of them in the end, because an interrupted request may not.
    `estimates` returns what other requests have learned about the replica of the target that serves this one now, which
    adds to it. `memory` holds what was learned from outputs of tenants, to which one with a tenant adds. `clock`
    returns nanoseconds. The request counts into `statistics`, which the caller may read at any time. `grammar` follows
    the request's grammar from the start of the text; `target` must obey the same. `started_ns`: when the request
    arrived, by the same clock; now by default.
    Raises `InvalidRequest` for a request that the target cannot serve, and the errors of `speculate`.
    """
    started = clock() if started_ns is None else started_ns
    prompt, end_id, max_tokens = await run(rendering_threads(request, model), _prepared, request, model)
    unshared = TargetEstimates(model.forward_costs)
    estimates = estimates or (lambda: unshared)
    next_draft = next_draft if request.speculation.allows(DRAFT) else None
    statistics = statistics or Statistics()
    tape, text = Tape(model.vocabulary, prompt.ids), TextStream(request.stop)
    opening = Opening(
        tape=tape,
        render=partial(render, request, source=model),
        confidence_threshold=request.speculation.assistant_confidence_threshold,
        memory=memory,
        tenant=request.tenant,
        grammar=grammar,
        threads=partial(rendering_threads, request),
        clock=clock,
    )
    threads = threads_for(request.input_byte_count)
    at_once = await run(threads, open_sources, opening, request.speculation.allows)
    opened = list(at_once)  # also those that are dropped or replaced later
    own_estimates = RequestEstimates(estimates(), at_once)
    planner = Planner(request.speculation, own_estimates)

    def on_draft(draft: DraftSource) -> None:
        opened.append(draft)
        own_estimates.use_draft(draft.times)
        draft.on_use()
        statistics.drafts.append(draft.model.name)

    sources = SourceSet(at_once, model, end_id, grammar, on_draft)
    if next_draft:
        await sources.use_drafts(partial(_find_draft, next_draft, opening, sources))
    link = TargetLink(target, model, tape, max_tokens, clock, request.logprobs)
    finish_reason: FinishReason | None = None
    first_token_ns = sent = sent_bytes = reported_ns = 0
    passes = speculate(link, sources, planner, statistics, clock)
    with closing(sources), ExitStack() as ended:
        ended.callback(lambda: own_estimates.shared.observe_text(tape.generated_token_count))
        yield Started(len(prompt.ids))
        async with aclosing(passes):
            async for outcome in passes:
                own_estimates.use_target(estimates())
                first_token_ns = first_token_ns or clock() - started
                finish_reason = outcome.result.finish_reason
                if finish_reason is not FinishReason.STOP and tape.generated_token_count == max_tokens:
                    # Without a limit of the request that is the context; a replica with a longer one does not say so.
                    finish_reason = FinishReason.LENGTH if request.max_tokens else FinishReason.CONTEXT_FULL
                delta = _delta(text, outcome, final=finish_reason is not None)
                sent += len(delta.token_ids)
                sent_bytes += sum(map(len, outcome.data[: len(delta.token_ids)]))
                if request.reports_progress and clock() - reported_ns >= _PROGRESS_NS:
                    reported_ns = clock()
                    statistics.note, statistics.plan_summary = sources.note, planner.summary(sources.state)
                    delta = replace(delta, progress=statistics)
                yield delta
                if text.stopped:
                    finish_reason = FinishReason.STOP
                    break
    assert finish_reason is not None, "the loop ends with one, or with an error"
    statistics.finish(opened)
    statistics.plan_summary = planner.summary(sources.state)
    statistics.note = sources.note or (_OVERDUE if sources.state and sources.state.overdue else "")
    yield Finished(
        finish_reason=finish_reason,
        prompt_token_count=len(prompt.ids),
        generated_token_count=sent,
        generated_byte_count=sent_bytes,
        elapsed_ns=clock() - started,
        first_token_ns=first_token_ns,
        mode=Mode.OFF if sources.empty else planner.mode,
        statistics=statistics,
    )


def _prepared(request: Request, model: Model) -> tuple[Rendering, int | None, int]:
    """Checks a request and renders it, which takes time for a long prompt, or for biases of a whole vocabulary.

    Also returns the id that is proposed for the end of the text, in a chat that of the end of the assistant's turn, and
    the limit on generated tokens.
    """
    check(request, model.has_all)
    is_chat = isinstance(request.input, Chat)
    end_id = end_of_turn(model) if is_chat else next(iter(model.special_ids.eos), None)
    prompt = render(request, model, model)
    return prompt, end_id, token_room(request, model, prompt.ids)


async def _find_draft(
    next_draft: NextDraft, opening: Opening, sources: SourceSet, error: DraftBridgeError | None
) -> DraftSource | None:
    """Opens the next draft that takes the request; see `SourceSet`."""
    while draft := next_draft(error):
        try:
            return await open_draft(draft, opening)
        except DraftBridgeError as refusal:
            error = refusal
            sources.note_refusal(refusal)
    return None


def _delta(stream: TextStream, outcome: Outcome, *, final: bool) -> Delta:
    """Returns a pass as text, up to the token that completes a stop string. A token that ends the text adds no text."""
    result, sources, text, count = outcome.result, outcome.accepted_sources, "", len(outcome.data)
    shown = outcome.data[:-1] if result.finish_reason is FinishReason.STOP else outcome.data
    for place, data in enumerate(shown):
        text += stream.push(data, sources[place] if place < len(sources) else "")
        if stream.stopped:
            count = place + 1
            break
    if final and not stream.stopped:
        text += stream.push(b"", final=True)
    return Delta(text, result.token_ids[:count], result.logprobs[:count], stream.spans(text))
