"""Chooses the fastest of several engines for a model by measurement, and remembers the choice for file and machine.

    python -m services.engines.trial ENGINE PATH OPTIONS

Each engine is tried in a process of its own, so that a crash or a library that cannot be loaded does no harm. What
counts is the speed with speculation: of the passes of 1 to 25 tokens, the one with the most expected tokens per second
if each candidate is right with a chance of 0.7. A draft makes passes of one token.
"""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from bridge.errors import DraftBridgeError, UnusableModel
from services.engines.cpu import core_count, cpu_facts
from services.engines.engine import measure, warm
from services.engines.fixed_width import as_served
from services.engines.huge_pages import use_huge_pages
from services.engines.measuring import alone, library_facts, reading_seconds, remember, run, speed
from services.engines.openmp import bind_threads, limit_spinning
from services.engines.spec import Dtype, EngineOptions, EngineSpec, GaudiOptions, Weights
from services.engines.timing import Timing
from services.errors import DamagedFile, TrialUnfinished
from services.store.cache import CacheUnusable, NoSpace, Report, cache_directory
from services.store.gguf import is_gguf

_log = logging.getLogger(__name__)

# The times of an engine's forwards by their number of tokens.
Timings: TypeAlias = list[tuple[int, Timing]]
# By engine: its speed, 0 if it was refused, and when that was found out, in seconds since 1970.
_Known: TypeAlias = dict[str, tuple[float, float]]
# With a smaller model, the difference is not worth the seconds of a trial.
_MIN_WEIGHT_BYTES = 64 << 20
# The least memory for the one sequence of a trial; it has more if the options give more to each.
_CACHE_BYTES = 256 << 20
# Engines are tried in turn this often: the machine may have other work for seconds, and the choice is remembered. What
# was remembered by an earlier rule, or of slower engines, is measured anew.
_ROUNDS, _RULE = 2, 5
# What a trial may take besides reading its files, and how often it may read them: as the four probes of ik_llama, which
# belong to its trial, and once more.
_TIMEOUT_SECONDS, _READINGS = 540, 5
# How long a refusal is believed: memory may have been short, or a library has been mended elsewhere.
_REFUSAL_SECONDS = 24 * 3600
# The speed of an engine whose trial ended too early: better than that of one that was refused.
_UNKNOWN = 1e-9
# The exit status of a trial whose engine refuses the model, and of one that is to be repeated; the reason is the last
# line that it prints.
_REFUSED, _UNFINISHED = 3, 4


def fastest(
    rivals: Sequence[EngineSpec],
    model: str,
    options: EngineOptions,
    *,
    report: Report,
    drafts: bool = False,
    deterministic: bool | None = False,
    attempt: Callable[[str, Path, EngineOptions, bool | None], Timings] | None = None,
) -> EngineSpec | None:
    """Returns the fastest engine for a model, or the first of `rivals` if there is little to gain.

    Returns None if none runs the model. Each engine is tried twice, and the better trial counts. One whose trials were
    all disturbed by other work is measured again at the next start. One whose trial ended for want of time or memory
    counts as the slowest, but is not left out, until the next start tries it again; a refusal is believed for a day. A
    single engine is not measured if it has `try_file`. `drafts`: the model only drafts. `deterministic`: as for
    `as_served`. `attempt` measures one engine. Raises `DamagedFile`, and `TrialUnfinished` for a single engine.
    """
    chosen = {one.name: replace(options, weights=_weights(one, options)) for one in rivals}
    paths = dict[str, Path]()
    for one in rivals:
        try:
            paths[one.name] = one.prepare(model, chosen[one.name], report)
        except DamagedFile:
            raise  # other engines would only take longer to find that out
        except (UnusableModel, NoSpace, CacheUnusable) as error:
            report(f"{one.name} is not used: {error}")
    rivals = [one for one in rivals if one.name in paths]
    if not rivals:
        return None
    if max(map(_size, paths.values())) < _MIN_WEIGHT_BYTES:
        return rivals[0]
    # Of a single engine the trial shows only whether it runs the model: passes of one token are enough.
    drafts = drafts or len(rivals) == 1
    file = cache_directory().parent / "engines" / f"{_key(rivals, paths, options, drafts, deterministic)}.json"
    if len(rivals) == 1 and (try_file := rivals[0].try_file):
        (name,) = paths
        if name in _read(file):
            report(f"{model} does not run here with {name}")
            return None
        try:
            try_file(paths[name], chosen[name], report)
        except (DraftBridgeError, OSError, ValueError, ImportError) as error:  # the library may be another build
            if isinstance(error, TrialUnfinished):
                raise  # an engine of other files may need several times the memory, and longer
            report(f"{name} is not used: {error}")
            remember(file, {name: (0.0, time.time())})
            return None
        return rivals[0]

    def try_one(name: str) -> tuple[float, bool]:
        timings = (attempt or partial(_attempt, drafts=drafts))(name, paths[name], chosen[name], deterministic)
        costs = [(width, timing.taken_ns) for width, timing in timings]
        return speed(costs, drafts=drafts), any(timing.disturbed for _, timing in timings)

    known = _read(file)
    if not known.keys() >= paths.keys():
        with alone(2 * max(map(_limit, paths.values()))):
            known = _read(file)  # another process may have measured meanwhile
            if missing := [name for name in paths if name not in known]:
                report(f"measuring how fast {model} is here with {', '.join(missing)} (once)")
                found, disturbed = _measured(missing, try_one, report, rounds=_ROUNDS if len(paths) > 1 else 1)
                known |= {name: (value, time.time()) for name, value in found.items()}
                if disturbed:
                    report(f"other work slowed down {', '.join(sorted(disturbed))}: the next start measures again")
                remember(file, {name: pair for name, pair in known.items() if name not in disturbed})
    speeds = {name: value for name, (value, _) in known.items()}
    if all(speeds.get(name) == 0.0 for name in paths):
        report(f"{model} does not run here with {', '.join(paths)}")
        return None
    best = max(rivals, key=lambda one: speeds.get(one.name, _UNKNOWN))
    figures = ", ".join(f"{name} {value:.0f}" for name, value in speeds.items())
    expected = "tokens/s" if drafts else "expected tokens/s with a good draft"
    report(f"the fastest engine for {model} here: {best.name} ({expected}: {figures})")
    return best


def _measured(
    names: Sequence[str], try_one: Callable[[str], tuple[float, bool]], report: Report, *, rounds: int
) -> tuple[dict[str, float], set[str]]:
    """Tries each engine `rounds` times, in turn. `try_one` returns its speed, and whether other work disturbed it.

    Returns the best speed of each, 0 if it was refused, and the names of those that were disturbed each time. An engine
    whose trial failed for want of time or memory is in neither.
    """
    speeds, settled = dict[str, float](), set[str]()
    for turn in range(rounds):
        for name in names:
            if turn and not speeds.get(name):
                continue  # it was refused, or its trial takes too long
            try:
                found, disturbed = try_one(name)
            except _TrialFailed as error:
                report(f"{name} is not used: {error}")
                if not error.passing:
                    speeds[name] = 0.0
                    settled.add(name)
                continue
            speeds[name] = max(found, speeds.get(name, 0.0))
            if not disturbed:
                settled.add(name)
    return speeds, speeds.keys() - settled


class _TrialFailed(DraftBridgeError):
    """An engine could not be tried. `passing`: for want of time or memory, so that another trial may succeed."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


def _weights(spec: EngineSpec, options: EngineOptions) -> Weights:
    return spec.auto_weights if options.weights is Weights.AUTO else options.weights


def _attempt(name: str, path: Path, options: EngineOptions, deterministic: bool | None, *, drafts: bool) -> Timings:
    """Measures an engine in another process. Raises `_TrialFailed`."""
    given = _encoded(options, deterministic, drafts)
    limit = _limit(path)
    try:
        done = run(__name__, name, str(path), given, seconds=limit)
    except subprocess.TimeoutExpired:
        raise _TrialFailed(f"its trial took more than {limit:.0f} s", passing=True) from None
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode in (_REFUSED, _UNFINISHED):
        raise _TrialFailed(last, passing=done.returncode == _UNFINISHED)
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
        reason = (done.stderr.strip().splitlines() or [""])[-1][:300]
        raise _TrialFailed(f"its trial ended with {how} ({reason})", passing=done.returncode == -signal.SIGKILL)
    return [(width, Timing(**timing)) for width, timing in json.loads(last)]


def _limit(path: Path) -> float:
    """Returns the seconds that a trial may take."""
    return _TIMEOUT_SECONDS + _READINGS * reading_seconds(sum(file.stat().st_size for file in _files(path)))


def _encoded(options: EngineOptions, deterministic: bool | None, drafts: bool) -> str:
    return json.dumps(asdict(options) | {"deterministic": deterministic, "drafts": drafts}, default=str)


def _decoded(text: str) -> tuple[EngineOptions, bool | None, bool]:
    given = json.loads(text)
    deterministic, drafts = given.pop("deterministic"), given.pop("drafts")
    gaudi = given["gaudi"]
    file = gaudi["quant_config"]
    given |= {
        "dtype": Dtype(given["dtype"]),
        "weights": Weights(given["weights"]),
        "gaudi": GaudiOptions(**gaudi | {"quant_config": Path(file) if file else None}),
    }
    return EngineOptions(**given), deterministic, drafts


def _size(path: Path) -> int:
    return max((file.stat().st_size for file in _files(path)), default=0)


def _files(path: Path) -> list[Path]:
    """Returns the files with weights: a GGUF file, those beside a converted model, or those of a directory."""
    if path.is_file() and is_gguf(path):
        return [path]
    return sorted(file for file in (path if path.is_dir() else path.parent).iterdir() if file.is_file())


def _key(
    rivals: Sequence[EngineSpec],
    paths: dict[str, Path],
    options: EngineOptions,
    drafts: bool,
    deterministic: bool | None,
) -> str:
    """Names the files, the machine, the options and the installed libraries."""
    files = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns) for path in paths.values() for file in _files(path)
    ]
    modules = [name for one in rivals for name in one.modules]
    if options.weights is Weights.INT8:  # which torch needs for these weights only
        modules.append("torchao")
    libraries = [library_facts(name) for name in modules]
    # torch uses the variable if no option sets the number of threads.
    machine = (cpu_facts(), core_count(), os.environ.get("OMP_NUM_THREADS", ""))
    given = (options.device, options.dtype.value, options.weights.value, options.threads, _cache_bytes(options))
    facts = (files, libraries, machine, given, _RULE)
    return hashlib.sha256(repr((facts, drafts, deterministic)).encode()).hexdigest()[:24]


def _cache_bytes(options: EngineOptions) -> int:
    return max(_CACHE_BYTES, options.cache_byte_limit // options.slot_count)


def _read(file: Path) -> _Known:
    """Returns what is remembered, without refusals that are too old."""
    try:
        oldest = time.time() - _REFUSAL_SECONDS
        known = {str(name): (float(value), float(when)) for name, (value, when) in json.loads(file.read_text()).items()}
        return {name: (value, when) for name, (value, when) in known.items() if value or when > oldest}
    except (OSError, ValueError, TypeError, AttributeError):  # absent, or not written by this version
        return {}


def main() -> None:
    """Prints the measured costs of one engine, or why it refuses the model."""
    from services.engines.registry import engine_spec

    name, path = sys.argv[1], Path(sys.argv[2])
    options, deterministic, drafts = _decoded(sys.argv[3])
    limit_spinning()  # as a server does
    bind_threads(options.device, options.threads, compiles=options.compile)
    try:
        opened = engine_spec(name).open(path, replace(options, slot_count=1, cache_byte_limit=_cache_bytes(options)))
    except DraftBridgeError as error:
        print(" ".join(str(error).split()))
        sys.exit(_UNFINISHED if isinstance(error, TrialUnfinished) else _REFUSED)
    use_huge_pages()
    engine = as_served(opened, deterministic)
    if engine is opened:
        warm(engine, (1, 2, 3, 4, 6, 8, 12))
    found = measure(engine, all_logits=False, widths=(1,)) if drafts else measure(engine, all_logits=True)
    print(json.dumps([(width, asdict(timing)) for width, timing in found]))


if __name__ == "__main__":
    main()
