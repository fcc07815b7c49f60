"""Compares settings of an engine: threads, pinning, allocators, OpenMP; on a Gaudi, options of the habana engine.

    python -m benchmarks.environments --way "plain" --way "pinned: affinity=0-1" \\
        --way "tcmalloc: LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4" [--engine torch]
        [--model NAME] [--rounds 3] [--json FILE]

A way is a name, and settings after a colon, separated by blanks: variables of the environment, `affinity=CORES`,
`threads=N`, `dtype=DTYPE`, and `use_flash_attention=true` or another field of `GaudiOptions`. For each way, in turn, a
new process opens the engine and measures the median milliseconds of a pass of 1 and of 8 tokens after 256, and of
reading a prompt of 512. Prints the medians over the rounds, and speeds relative to the first way. The times exclude
gRPC and sampling.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

CONTEXT, PROMPT = 256, 512
SIZES = ("1 token", "8 tokens", f"prompt of {PROMPT}")
Times = dict[str, float]
# Passes of a size run at least so often, and for at least this long.
_MIN_REPEATS, _MEASURED_MS = 3, 1500


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", required=True)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _, settings = parse(options.way[0])
        print(json.dumps(measured(options.model, options.engine, settings)))
        return
    samples: dict[str, list[Times]] = defaultdict(list)
    for _ in range(options.rounds):
        for way in options.way:
            name, settings = parse(way)
            done = subprocess.run(
                _child(options, way), env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True
            )
            samples[name].append(json.loads(done.stdout.splitlines()[-1]))
            if options.json:
                options.json.write_text(json.dumps(samples, indent=1))
    Console().print(table(samples))


def _child(options: argparse.Namespace, way: str) -> list[str]:
    common = ("--engine", options.engine, "--model", options.model)
    return [sys.executable, "-m", "benchmarks.environments", "--child", "--way", way, *common]


def parse(way: str) -> tuple[str, dict[str, str]]:
    """Returns a way's name and settings: `pinned: affinity=0-1 threads=2`."""
    name, _, settings = way.partition(":")
    return name.strip(), dict(one.split("=", 1) for one in settings.split())


def measured(model: str, engine: str, settings: dict[str, str]) -> Times:
    """Returns milliseconds by size, in this process."""
    from services.engines.affinity import pin
    from services.engines.engine import Row
    from services.engines.registry import engine_spec
    from services.engines.spec import Dtype, EngineOptions, GaudiOptions

    cores = pin(settings["affinity"]) if "affinity" in settings else None
    threads = int(settings["threads"]) if "threads" in settings else len(cores) if cores else None
    gaudi = {one.name: json.loads(settings[one.name]) for one in fields(GaudiOptions) if one.name in settings}
    spec = engine_spec(engine)
    dtype = Dtype(settings.get("dtype", "auto"))
    options = EngineOptions(dtype=dtype, threads=threads, slot_count=1, gaudi=GaudiOptions(**gaudi))
    opened = spec.open(spec.prepare(model, options, lambda text: None), options)
    ids = tuple(index % 1000 + 10 for index in range(PROMPT))
    rows = {
        SIZES[0]: Row(0, CONTEXT, ids[:1], 0),
        SIZES[1]: Row(0, CONTEXT, ids[:8], 0),
        SIZES[2]: Row(0, 0, ids, PROMPT - 1),
    }
    found = {}
    for size, row in reversed(rows.items()):
        times: list[float] = []
        while len(times) < _MIN_REPEATS or sum(times) < _MEASURED_MS:
            started = time.perf_counter()
            opened.forward([row])
            times.append((time.perf_counter() - started) * 1e3)
        found[size] = median(times)
    return found


def table(samples: dict[str, list[Times]]) -> Table:
    """Returns medians over rounds, with the speed relative to the first way."""
    first = next(iter(samples))
    result = Table("", *(f"{size}, ms" for size in SIZES))
    for name, rounds in samples.items():
        cells = []
        for size in SIZES:
            own, base = (median(one[size] for one in some) for some in (rounds, samples[first]))
            cells.append(f"{own:.1f} ({base / own:.2f}x)")
        result.add_row(name, *cells)
    return result


if __name__ == "__main__":
    main()
