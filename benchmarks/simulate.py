"""Measures the gain of speculation by distance and draft speed with simulated models, against an event simulation.

    python -m benchmarks.simulate [--pair VERIFY_MS DRAFT_MS ACCEPTANCE ...] [--round-trip MS ...] [--jitter 0.1]
        [--trace FILE [--traced NAME ...]] [--tokens 300] [--learning 1200] [--virtual] [--json FILE] [--plot FILE.png]

Each pair of speeds at each distance runs in every mode through the real loop, planner, sessions and schedulers in one
process. Only the models and the connection to the draft are scripted (`benchmarks.scripted`). The draft is right at
random with probability ACCEPTANCE, or with `--trace` where `benchmarks.traces` recorded that a real draft was right:
the pairs of speeds and distances are measured with each recorded pair, or with those named ("TARGET <- DRAFT").
`--virtual` takes seconds instead of minutes, without threads and sleeping (`benchmarks.virtual`).
Prints the speed over that of the target alone in the same run, and in brackets its ratio to the event simulation.
The automatic mode is measured after `--learning` more tokens, from which it learns as it would from earlier requests;
with 0 it is the first request of a new bridge.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import recorded, scripted, virtual
from benchmarks.scripted import Pair
from bridge.loop import speculate
from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import Mode, Planner, SpeculationParameters
from bridge.sources import open_sources
from bridge.sources.draft import DraftSource
from bridge.sources.source import DRAFT, Draft, Opening
from bridge.sources.source_set import SourceSet
from bridge.statistics import Statistics
from bridge.tape import Tape
from bridge.target_link import TargetLink
from bridge.text.vocabulary import Rendering
from services.engines.scheduler import Scheduler
from services.model.draft.session import DraftSession
from services.model.target.session import TargetSession

PAIRS = (Pair(40, 4, 0.8), Pair(30, 7, 0.6), Pair(10, 1, 0.6), Pair(10, 10, 0.5))
ROUND_TRIPS = (0, 10, 50, 100)
MODES = (Mode.LOCKSTEP, Mode.OPPORTUNISTIC, Mode.AUTO)
LOCKSTEP_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# The patience values that the simulation tries, in draft tokens; the maximum number of candidates per forward.
PATIENCE = (0.0, 1.5, 4.0)
WIDTH = 12
SEED = 1
# Tokens generated in the automatic mode before it is measured; for other modes they are part of the prompt.
LEARNING = 1200
PROMPT = LEARNING + 64


@dataclass(frozen=True)
class Laboratory:
    """What runs a coroutine and an engine, and the clock in seconds: in real or virtual time."""

    run: Callable[[Coroutine[Any, Any, float]], float]
    scheduler: Callable[[Callable[[], Any]], Any]
    clock: Callable[[], float]


REAL = Laboratory(asyncio.run, Scheduler, perf_counter)
VIRTUAL = Laboratory(virtual.run, virtual.VirtualScheduler, virtual.clock)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--learning", type=int, default=LEARNING, help=f"tokens, at most {LEARNING}")
    parser.add_argument("--virtual", action="store_true", help="in virtual time")
    parser.add_argument("--pair", nargs=3, type=float, action="append", metavar=("VERIFY_MS", "DRAFT_MS", "ACCEPTANCE"))
    parser.add_argument("--round-trip", nargs="+", type=float, default=ROUND_TRIPS, help="milliseconds")
    parser.add_argument("--jitter", type=float, default=0.0, help="random part of forward times, as a fraction")
    parser.add_argument("--trace", type=Path, help="recorded traces of where drafts were right, instead of random")
    parser.add_argument("--traced", nargs="+", metavar="NAME", help="only these pairs of the traces")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    arguments = parser.parse_args()
    if arguments.traced and not arguments.trace:
        parser.error("--traced names pairs of a file: add --trace FILE")
    if not 0 <= arguments.learning <= LEARNING:
        parser.error(f"--learning must be 0 to {LEARNING}")
    pairs = [Pair(*speeds) for speeds in arguments.pair] if arguments.pair else PAIRS
    pairs = [replace(pair, jitter=arguments.jitter) for pair in pairs]
    if arguments.trace:
        found = recorded.read(arguments.trace)
        if unknown := set(arguments.traced or ()) - set(found):
            parser.error(f"no trace of {', '.join(sorted(unknown))}: the file has {', '.join(found)}")
        pairs = [traced(pair, found[name]) for name in arguments.traced or found for pair in pairs]
    rows = []
    for pair in pairs:
        for round_trip in arguments.round_trip:
            laboratory = VIRTUAL if arguments.virtual else REAL
            placed = replace(pair, round_trip_ms=round_trip)
            rows.append(row(placed, arguments.tokens, laboratory, arguments.learning))
            Console(stderr=True).print(f"[dim]{rows[-1]}[/]")
    Console(width=110).print(_table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        _plot(rows, pairs, arguments.plot)


def traced(pair: Pair, trace: recorded.Pair) -> Pair:
    """Returns the pair with a draft that is right where a recorded one was."""
    return replace(pair, trace=trace.right, name=trace.name)


def row(pair: Pair, tokens: int, laboratory: Laboratory, learning: int = LEARNING) -> dict[str, Any]:
    """Returns a pair's parameters, and the speed of every mode over the target alone, measured and simulated."""
    found: dict[str, Any] = asdict(replace(pair, trace=""))
    span = range(PROMPT, PROMPT + tokens)
    if pair.trace:  # in the measured part of the text
        found["acceptance"] = sum(pair.is_right(SEED, place) for place in span) / tokens
    count = min(LOCKSTEP_TOKENS, key=lambda count: lockstep_ms(pair, count, span if pair.trace else None))
    alone = laboratory.run(measure(pair, Mode.OFF, tokens, None, laboratory))
    found["simulated_lockstep"] = pair.verify_ms / lockstep_ms(pair, count, span)
    found["simulated_opportunistic"] = pair.verify_ms / two_runners_ms(pair, 0.0, span)
    ahead = [pair.verify_ms / two_runners_ms(pair, patience * pair.draft_ms, span) for patience in PATIENCE]
    found["simulated_auto"] = max(1.0, *ahead)
    for mode in MODES:
        assistant_tokens = count if mode is Mode.LOCKSTEP else None
        taken = laboratory.run(measure(pair, mode, tokens, assistant_tokens, laboratory, learning))
        found[mode.value] = alone / taken
    return found


async def measure(
    pair: Pair,
    mode: Mode,
    tokens: int,
    assistant_tokens: int | None,
    laboratory: Laboratory,
    learning: int = LEARNING,
) -> float:
    """Returns the milliseconds per token after the first pass."""

    def clock() -> int:
        return 1 + int(1e9 * laboratory.clock())

    model = scripted.model()
    learning = learning if mode is Mode.AUTO else 0
    prompt = scripted.text(SEED, PROMPT - learning)
    schedulers = [
        laboratory.scheduler(lambda engine=engine: engine) for engine in scripted.engines(pair, SEED, PROMPT + tokens)
    ]  # type: ignore[misc]
    try:
        with (
            closing(TargetSession(model, schedulers[0], scripted.sampler(), clock)) as target,
            closing(DraftSession(model, schedulers[1], scripted.sampler())) as session,
        ):
            tape, estimates = Tape(model.vocabulary, prompt), TargetEstimates(_forward_costs(pair.forward_ms))
            draft_estimates = estimates.draft("scripted", _forward_costs(lambda width: pair.draft_ms))
            # The given number of tokens is for lockstep; opportunistic mode needs enough to bridge the distance.
            if mode is Mode.OPPORTUNISTIC:
                assistant_tokens = min(64, int((pair.round_trip_ms + pair.verify_ms) / pair.draft_ms) + 5)
            parameters, text = SpeculationParameters(mode, assistant_tokens), model.vocabulary.spell(prompt)
            draft = Draft(model, scripted.Distant(session, pair.round_trip_ms), draft_estimates)
            opening = Opening(tape, lambda model: Rendering(list(prompt), 0, text), clock=clock)
            sources = open_sources(opening, parameters.allows)
            own = RequestEstimates(estimates, sources)
            chain = SourceSet(sources, model, scripted.END, on_draft=lambda draft: own.use_draft(draft.times))
            if parameters.allows(DRAFT):
                chain.insert(DraftSource(draft, opening))
            loop = speculate(
                TargetLink(target, model, tape, learning + tokens, clock),
                chain,
                Planner(parameters, own),
                Statistics(),
                clock,
            )
            started, from_token = 0.0, 0
            async with aclosing(loop) as outcomes:
                async for _ in outcomes:
                    if not started and tape.generated_token_count > learning:
                        started, from_token = laboratory.clock(), tape.generated_token_count
            expected = scripted.text(SEED, len(tape.ids))
            assert list(tape.ids) == expected, "the text is not the target's own"
            return 1000 * (laboratory.clock() - started) / (tape.generated_token_count - from_token)
    finally:
        for scheduler in schedulers:
            scheduler.close()


def _forward_costs(forward_ms: Callable[[int], float]) -> list[tuple[int, int]]:
    """Returns forward costs as a model server measures them at its start."""
    return [(width, int(1e6 * forward_ms(width))) for width in (1, 2, 3, 5, 9, 17, 25)]


def lockstep_ms(pair: Pair, count: int, places: range | None = None) -> float:
    """Returns the milliseconds per token in lockstep with `count` draft tokens, turn by turn over places of the text.

    Without places, returns the expectation in closed form (Leviathan et al.).
    """
    turn_ms = pair.forward_ms(count + 1) + count * pair.draft_ms + pair.round_trip_ms
    if places is None:
        return turn_ms / sum(pair.acceptance**index for index in range(count + 1))
    turns, committed = 0, places.start
    while committed < places.stop:
        committed += _right(pair, committed, count) + 1
        turns += 1
    return turns * turn_ms / (committed - places.start)


def _right(pair: Pair, place: int, count: int) -> int:
    """Returns how many of `count` candidates from `place` on are accepted."""
    return next((index for index in range(count) if not pair.is_right(SEED, place + index)), count)


def two_runners_ms(pair: Pair, patience_ms: float, places: range) -> float:
    """Simulates draft and target that both run, event by event, and returns the milliseconds per token.

    The bridge is next to the target. A proposal arrives half a round trip after it was made. A draft that was wrong or
    overtaken learns so half a round trip later and starts a new epoch.
    """
    half = pair.round_trip_ms / 2
    now, committed = 0.0, places.start
    begin, first_ms = committed, half + pair.draft_ms + half  # the epoch's first token, and when it arrives
    while committed < places.stop:
        while True:
            ready = begin + _arrived_count(pair, now - first_ms) - committed
            if ready > 0 or patience_ms == 0:
                break
            comes = first_ms + (committed - begin) * pair.draft_ms
            if comes > now + patience_ms:
                now += patience_ms
                break
            now = comes
        taken = max(0, min(ready, WIDTH))
        committed += _right(pair, committed, taken) + 1
        now += pair.forward_ms(taken + 1)
        arrived = begin + _arrived_count(pair, now - first_ms)
        # Includes proposals for places that the target had passed by then.
        judged = min(arrived, committed)
        wrong = _right(pair, begin, judged - begin) < judged - begin
        if wrong or first_ms + (committed - begin) * pair.draft_ms > now + 2 * half + pair.draft_ms:
            begin, first_ms = committed, now + half + pair.draft_ms + half
    return now / (committed - places.start)


def _arrived_count(pair: Pair, since_first_ms: float) -> int:
    """Returns the number of draft tokens that have arrived, given the milliseconds since the first."""
    # A token counts at the time that it is due, despite rounding.
    return max(int((since_first_ms + 1e-6) // pair.draft_ms) + 1, 0)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "verify, draft, accepted", "round trip", *(mode.value for mode in MODES), title="speed over the target alone "
        "(part of the simulation's)", box=box.SIMPLE,
    )  # fmt: skip
    for one in rows:
        cells = [f"{one[mode.value]:.2f} ({one[mode.value] / one[f'simulated_{mode.value}']:.2f})" for mode in MODES]
        label = f"{one['verify_ms']:g} ms, {one['draft_ms']:g} ms, {one['acceptance']:.2g}"
        if one["name"]:
            label = f"{one['name']}: {label}"
        table.add_row(label, f"{one['round_trip_ms']:g} ms", *cells)
    return table


def _plot(rows: Sequence[dict[str, Any]], pairs: Sequence[Pair], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(pairs), figsize=(4 * len(pairs), 3.6), sharex=True, squeeze=False)
    colors = {Mode.LOCKSTEP: "tab:orange", Mode.OPPORTUNISTIC: "tab:blue", Mode.AUTO: "tab:green"}
    count = len(rows) // len(pairs)
    for index, (axis, pair) in enumerate(zip(axes[0], pairs, strict=True)):
        own = rows[index * count : (index + 1) * count]
        distances = [row["round_trip_ms"] for row in own]
        for mode in MODES:
            axis.plot(distances, [row[mode.value] for row in own], "o-", color=colors[mode], label=mode.value)
            axis.plot(distances, [row[f"simulated_{mode.value}"] for row in own], ":", color=colors[mode])
        axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.set_title(
            f"{pair.name}\n" * bool(pair.name)
            + f"verify {pair.verify_ms:g} ms, draft {pair.draft_ms:g} ms, {own[0]['acceptance']:.0%} right",
            fontsize=9,
        )
        axis.set_xlabel("round trip to the draft, ms")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("speed over the target alone")
    axes[0][0].legend(title="dotted: simulated", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
