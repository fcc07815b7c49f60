"""How a file is best run on this machine: tried in a process of its own, where a crash does no harm, and remembered.

    python -m services.engines.ik_llama.probe GGUF THREADS REPACKED [WAY]

The library can rearrange ("repack") the weights for the processor. Passes of several tokens may then get faster, but
for some types the logits of a single token are no longer those of the same token in a wider pass. The engine then adds
a token to it, so a way with repacked weights is charged two tokens for one. What counts is the speed with speculation.
"""

import hashlib
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from bridge.errors import UnusableModel
from services.engines.cpu import cpu_facts
from services.engines.measuring import alone, library_facts, reading_seconds, remember, run, speed
from services.engines.timing import Timing, timed
from services.errors import TrialUnfinished
from services.store.cache import Report, cache_directory

if TYPE_CHECKING:  # it loads a library that may not be installed
    from services.engines.ik_llama.library import Context

_log = logging.getLogger(__name__)

# Widths whose passes are timed, how often, and the tokens before them.
_TIMED_WIDTHS, _REPETITIONS, _CONTEXT = (1, 2, 4, 8), 3, 62
# Tokens whose logits are compared between widths, and with those of one and of two tokens.
_COMPARED, _COMPARED_SINGLY = 31, 8
# The number of the rule by which a way is chosen: what was remembered by an earlier rule is measured anew.
_RULE = 3
# Both ways are tried in turn this often, because the machine may have other work for seconds, and what is remembered
# counts for good.
_ROUNDS = 2
# Repacked weights are in memory of the process's own and take longer to load: they have to gain this much.
_MIN_GAIN = 1.03
# What a probe may take besides reading the file.
_TIMEOUT_SECONDS = 120
# How long a choice counts that other work disturbed. The two ways have different logits, so a server that is restarted,
# or a replica that is started beside it, must not choose anew: the same seed would give another text.
_DISTURBED_SECONDS = 3600.0
# The exit status of a probe that refuses a file; the reason is the last line that it prints.
_REFUSED = 3


@dataclass(frozen=True)
class Way:
    """One way to run a file, and what was found out about it.

    `max_width`: tokens of a pass at most. `min_width`: single tokens are filled up to it. `drift`: how far a logit
    moved between widths from `min_width` to `max_width`, and with one thread, 0.0 if all were the same bit for bit.
    `pass_ns`: time of a pass of 1, 2, 4 and 8 tokens, with what is filled up. `disturbed`: other work was going on
    whenever one of them was measured; of a way that was chosen, also if that is true of the other way, or if that was
    refused, because memory may have been short.
    """

    repacked: bool
    max_width: int
    min_width: int
    drift: float
    pass_ns: tuple[int, ...]
    disturbed: bool = False


# Tries a file with a number of threads, with or without repacked weights. If it is given what an earlier try found, it
# measures only the times. Returns None if the library crashes.
Probe: TypeAlias = Callable[[Path, int, bool, Way | None], Way | None]


def choose_way(
    gguf: Path,
    threads: int,
    repacked: bool | None = None,
    probe: Probe | None = None,
    report: Report = lambda text: None,
) -> Way:
    """Returns the faster of two ways, of those that give the same logits at every width if there is one.

    `repacked`: the only way to try. `report` is called before it measures, which takes a while. Raises `UnusableModel`
    if the library cannot run the file, `TrialUnfinished` if that could not be found out.
    """
    file = cache_directory().parent / "ik_llama" / f"{_key(gguf, threads, repacked)}.json"
    if remembered := _read(file):
        return remembered
    tries = (False, True) * _ROUNDS if repacked is None else (repacked,)
    report(f"trying how ik_llama runs {gguf.name} best here, which it remembers")
    with alone(len(tries) * _limit(gguf)):
        return _read(file) or _measured(gguf, threads, tries, probe or _probe, file)


def _measured(gguf: Path, threads: int, tries: Sequence[bool], probe: Probe, file: Path) -> Way:
    """Tries ways in turn, and remembers the better one if all probes came to an end."""
    found, unfinished, refusal = dict[bool, Way | None](), "", ""
    for repacked in tries:
        before = found.get(repacked)
        if repacked in found and before is None:  # it has failed
            continue
        try:
            way = probe(gguf, threads, repacked, before)
        except TrialUnfinished as error:
            way, unfinished = before, str(error)  # what was measured in another round still holds
        except UnusableModel as error:
            way, refusal = before, str(error)  # the other way may do: repacked weights need memory of their own
        found[repacked] = _combined(before, way) if before and way else way
    plain, repacked_way = found.get(False), found.get(True)
    if plain is None and repacked_way is None:
        remedy = "--engine llamacpp or torch" if len(found) == 2 else "--weights auto"
        if unfinished:
            raise TrialUnfinished(f"{unfinished} with {gguf.name} here: use {remedy}", model=gguf)
        raise UnusableModel(refusal or f"ik_llama.cpp crashes with {gguf.name} here: use {remedy}", model=gguf)
    disturbed = bool(refusal) or any(one and one.disturbed for one in found.values())
    way = replace(_better(plain, repacked_way), disturbed=disturbed)
    if not unfinished:
        remember(file, asdict(way))
    return way


def _combined(one: Way, other: Way) -> Way:
    """Returns what two probes of the same way have found: the shortest times."""
    times = tuple(map(min, one.pass_ns, other.pass_ns))
    return replace(other, pass_ns=times, disturbed=one.disturbed and other.disturbed)


def _better(plain: Way | None, repacked: Way | None) -> Way:
    if plain is None or repacked is None:
        way = plain or repacked
        assert way
        return way
    if (plain.drift == 0.0) != (repacked.drift == 0.0):
        return plain if plain.drift == 0.0 else repacked
    return repacked if _speed(repacked) >= _MIN_GAIN * _speed(plain) else plain


def _speed(way: Way) -> float:
    return speed(list(zip(_TIMED_WIDTHS, way.pass_ns, strict=True)))


def _probe(gguf: Path, threads: int, repacked: bool, known: Way | None) -> Way | None:
    """See `Probe`. Works in another process.

    Raises `UnusableModel` if it refuses the file, `TrialUnfinished` if time or memory was short.
    """
    limit = _limit(gguf)
    try:
        given = [str(gguf), str(threads), str(int(repacked)), *([json.dumps(asdict(known))] if known else [])]
        done = run(__name__, *given, seconds=limit)
    except subprocess.TimeoutExpired:
        _log.warning("ik_llama.cpp took more than %.0f s to try %s", limit, gguf.name)
        raise TrialUnfinished(f"ik_llama.cpp takes more than {limit:.0f} s to start") from None
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == _REFUSED:
        raise UnusableModel(last, model=gguf)
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
        _log.warning("ik_llama.cpp ended with %s when it tried %s: %s", how, gguf.name, done.stderr[-500:])
        if done.returncode == -signal.SIGKILL:
            raise TrialUnfinished("ik_llama.cpp was killed, probably because memory ran out,")
        return None
    return _way(last)


def _limit(gguf: Path) -> float:
    """Returns the seconds that a probe may take."""
    return _TIMEOUT_SECONDS + reading_seconds(gguf.stat().st_size)


def _way(text: str) -> Way:
    fields = json.loads(text)
    return Way(**fields | {"pass_ns": tuple(fields["pass_ns"])})


def _key(gguf: Path, threads: int, repacked: bool | None) -> str:
    """Names the file, the machine, the library, and how the way is chosen."""
    status = gguf.stat()
    with gguf.open("rb") as file:
        head = hashlib.sha256(file.read(1 << 16)).hexdigest()
    facts = (head, status.st_size, status.st_mtime_ns, cpu_facts(), threads, repacked)
    library = (version("ik-llama-cpp-python"), library_facts("ik_llama_cpp"), _RULE)
    return hashlib.sha256(repr((facts, library)).encode()).hexdigest()[:24]


def _read(file: Path) -> Way | None:
    try:
        way = _way(file.read_text())
        counts = not way.disturbed or time.time() - file.stat().st_mtime < _DISTURBED_SECONDS
    except (OSError, ValueError, TypeError, KeyError):  # absent, or not written by this version
        return None
    return way if counts else None


def _measure(gguf: Path, threads: int, repacked: bool, known: Way | None = None) -> Way:
    """See `Probe`. Works in this process."""
    from services.engines.ik_llama.library import Context, Model

    model = Model(gguf, repacked=repacked)
    context = Context(model, 256, threads)
    choose = Random(0)
    ids = [choose.randrange(model.vocabulary_size) for _ in range(_CONTEXT + max(_TIMED_WIDTHS))]
    way = known or _compared(context, ids, threads, repacked, gguf.name)

    def time_pass(width: int) -> Timing:
        context.cut(_CONTEXT)
        return timed(lambda: context.decode(ids[_CONTEXT : _CONTEXT + width], _CONTEXT, 0))

    context.cut(0)
    for at in range(0, _CONTEXT, way.max_width):
        context.decode(ids[at : min(at + way.max_width, _CONTEXT)], at, min(way.max_width, _CONTEXT - at))
    rounds = [[time_pass(max(width, way.min_width)) for width in _TIMED_WIDTHS] for _ in range(_REPETITIONS)]
    best = list(map(min, zip(*rounds, strict=True)))
    return replace(way, pass_ns=tuple(one.taken_ns for one in best), disturbed=any(one.disturbed for one in best))


def _compared(context: "Context", ids: Sequence[int], threads: int, repacked: bool, name: str) -> Way:
    """Returns a way without times, from logits of the same tokens in passes of several widths."""
    import numpy as np

    from services.engines.ik_llama.library import MAX_WIDTH, SMALL_WIDTH

    def logits(width: int) -> "np.typing.NDArray[np.float32]":
        context.cut(0)
        count = _COMPARED if width > 2 else _COMPARED_SINGLY
        starts = range(0, count, width)
        return np.concatenate([context.decode(ids[at : min(at + width, count)], at, 0).copy() for at in starts])

    def drift(width: int) -> float:
        found = logits(width)
        return float(np.abs(found - reference[: len(found)]).max())

    reference = logits(4)
    if not np.isfinite(reference).all():
        raise UnusableModel(f"ik_llama.cpp computes no numbers with {name}: use --engine llamacpp or torch")
    max_width = SMALL_WIDTH if drift(MAX_WIDTH) else MAX_WIDTH
    wide, single = max(drift(max_width), drift(8), drift(2)), drift(1)
    if threads > 1:  # rows of one forward share the threads
        context.use_threads(1)
        wide = max(wide, drift(8))
        context.use_threads(threads)
    min_width = 2 if single and not wide else 1
    return Way(repacked, max_width, min_width, max(wide, 0.0 if min_width == 2 else single), ())


def main() -> None:
    """Prints what was found out, or why the file is refused."""
    try:
        known = _way(sys.argv[4]) if len(sys.argv) > 4 else None
        way = _measure(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", known)
    except UnusableModel as error:
        print(error)
        sys.exit(_REFUSED)
    print(json.dumps(asdict(way)))


if __name__ == "__main__":
    main()
