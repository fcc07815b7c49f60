"""Runs functions in new processes, in which optimum-habana has not replaced transformers' models yet.

They are forked from a process that has imported both libraries, which saves the seconds of the imports.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from services.engines.engine import Row
from tests.habana.models import opened

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.habana.fresh", "optimum.habana.transformers.modeling_utils"])


def in_fresh_process(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns what a function of a module returns, or raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *args, **options).result(timeout=120)


def served(directory: Path) -> tuple[str, list[float]]:
    """Opens a model as a service does: self-test, replacement, warm-up. Returns its class and the logits of id 1."""
    engine = opened(directory, use_hpu_graphs=False)
    return type(engine._model).__name__, engine.forward([Row(0, 0, (1,), 0)])[0][0].tolist()
