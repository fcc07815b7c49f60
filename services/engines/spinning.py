"""Limits how long threads of a forward, waiting for one another, keep cores that others need.

The threads of a forward meet some hundred times, and one that waits tries again and again, so that it notices at once.
OpenMP's library by itself tries 300,000 times, which takes milliseconds. All threads wait that long for one whose core
is in use elsewhere, and the last ones go on after the forward has ended, when the other model of a pair on the same
cores wants to start.
"""

import os

_COUNT = "GOMP_SPINCOUNT"
_SET_BY_USER = _COUNT in os.environ


def limit_spinning(count: int) -> None:
    """Limits for how many attempts threads wait before they sleep, in each OpenMP library that is loaded afterwards.

    Nothing changes if the process was started with GOMP_SPINCOUNT in its environment.
    """
    if not _SET_BY_USER:
        os.environ[_COUNT] = str(count)
    # Each of our own threads that runs forwards gets some. Once there are more than cores, OpenMP by itself lets them
    # sleep almost at once, also in forwards that run alone: those of Gemma-3-270M took twice as long from then on.
    os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
