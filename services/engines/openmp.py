"""Configures OpenMP, whose threads compute a forward together: how long they wait for one another, and on which cores.

The threads of a forward meet some hundred times, and one that waits tries again and again, so that it notices at once.
OpenMP's library by itself tries 300,000 times, which takes milliseconds. All threads wait that long for one whose core
is in use elsewhere, and the last ones go on after the forward has ended, when the other model of a pair on the same
cores wants to start.

With a thread for each core, whatever else runs for a moment moves one of them to the core of another. Both stay there
for up to a time slice, while the core that is free again stays idle. On two cores of an EPYC this nearly doubled the
time of 2% to 4% of Gemma-3-270M's passes; bound to cores, it is 2% faster alone and 3% to 6% while a bridge plans.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.child import OPENMP_BEFORE
from services.engines.affinity import physical_cores
from services.engines.cpu import surely_on_cpu
from services.interrupts import importing

_COUNT, _POLICY, _BIND, _PLACES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES"
_THREADS = "OMP_NUM_THREADS"

# With one of these a user has decided where threads run.
_CHOSEN = (_BIND, _PLACES, "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# torch's threads also wait while Python prepares the next step: on an EPYC, passes of Gemma-3-270M take a tenth longer
# with 1,000 attempts and no longer with 10,000. Not bound, beside a busy process: 127 ms, by default 1.2 s.
_TORCH = 10_000
# The cores that `bind_threads` has OpenMP bind the threads of a forward to, in order; empty if it binds none.
_bound_to: list[frozenset[int]] = []
# The threads of this process, as Linux shows them.
_TASKS = Path("/proc/self/task")


def limit_spinning(count: int = _TORCH) -> None:
    """Limits for how many attempts threads wait before they sleep, in each OpenMP library that is loaded afterwards.

    The default is the limit for torch.

    Nothing changes if the process was started with GOMP_SPINCOUNT in its environment.
    """
    if OPENMP_BEFORE[_COUNT] is None:
        os.environ[_COUNT] = str(count)
    # Each of our own threads that runs forwards gets some. Once there are more than cores, OpenMP by itself lets them
    # sleep almost at once, also in forwards that run alone: those of Gemma-3-270M took twice as long from then on.
    os.environ.setdefault(_POLICY, "ACTIVE")


def bind_threads(device: str, thread_count: int | None, *, compiles: bool) -> None:
    """Has each OpenMP library that is loaded afterwards bind the threads of a forward, if there is one for each core.

    `device`: as in `EngineOptions`; nothing is bound if the forwards may run elsewhere than on the CPU, because they
    need one thread of it there, and several servers may share the cores. `thread_count`: None for one per core.
    `compiles`: torch compiles the model; then nothing is bound, because its compilers would all run on one core.
    Nothing changes if the environment decides where threads run or how many there are, on systems that do not bind
    threads, and once torch is loaded.
    """
    if not hasattr(os, "sched_getaffinity") or "torch" in sys.modules or any(name in os.environ for name in _CHOSEN):
        return
    if compiles or (thread_count is None and _THREADS in os.environ):
        return
    allowed = os.sched_getaffinity(0)
    places = physical_cores(allowed)
    if thread_count is not None and thread_count >= len(allowed):  # also for the second hyper-threads of the cores
        places = [frozenset({one}) for one in sorted(allowed)]
    if surely_on_cpu(device) and (thread_count is None or thread_count >= len(places)):
        _bound_to[:] = places
        os.environ[_BIND] = "true"
        os.environ[_PLACES] = ",".join(f"{{{','.join(map(str, sorted(place)))}}}" for place in places)


def bind_this_thread() -> None:
    """Binds this thread to the first core, where OpenMP has the one that starts a forward, if `bind_threads` binds.

    OpenMP does so itself only in threads other than the one that loaded it. Only for engines that compute with OpenMP:
    others start their own threads, which would all run where this one is bound.
    """
    if _bound_to:
        os.sched_setaffinity(0, _bound_to[0])


@contextmanager
def unbound() -> Iterator[None]:
    """Gives all cores to the threads that start in the context, once it ends: for forwards beside one another.

    The threads of one forward are bound from the first core on. So the first ones of all such forwards would share that
    core, where a thread that the present one starts has its binding, too, and others would stay idle. What OpenMP keeps
    for later forwards is not bound again.
    """
    if not (_bound_to and _TASKS.is_dir()):
        yield
        return
    before = set(os.listdir(_TASKS))
    try:
        yield
    finally:
        for task in set(os.listdir(_TASKS)) - before:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(task), frozenset().union(*_bound_to))


@contextmanager
def loading(count: int = _TORCH) -> Iterator[None]:
    """Limits spinning in the OpenMP library that is loaded in the context, and gives this thread its cores back.

    The library binds the thread that loads it, which would hand the binding on to all threads and processes that it
    starts.
    """
    limit_spinning(count)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)


def load_torch() -> None:
    """Loads torch, which takes seconds, as `loading` describes."""
    with loading(), importing():
        import torch  # noqa: F401
