"""Runs tests of memory where no other thread allocates any."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_process(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Returns what a function of a module returns when it runs in a new process.

    There, tracemalloc counts no objects of other tests' threads. And before 3.12.9, CPython may crash or hang if
    another thread allocates memory while it starts or stops counting.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments, **options).result(120)
