"""Limits how long threads of a forward, waiting for one another, keep cores that others need.

The threads of a forward meet some hundred times, and one that waits tries again and again, so that it notices at once.
OpenMP's library by itself tries 300,000 times, which takes milliseconds. All threads wait that long for one whose core
is in use elsewhere, and the last ones go on after the forward has ended, when the other model of a pair on the same
cores wants to start.
"""

import os

_COUNT, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"

# What of the environment was there before.
_UNLIMITED = {name: os.environ.get(name) for name in (_COUNT, _POLICY)}
# torch's threads also wait while Python prepares the next step: on an EPYC, passes of Gemma-3-270M take a tenth longer
# with 1,000 attempts and no longer with 10,000. Beside a busy process: 127 ms, by default 1.2 s.
_TORCH = 10_000


def limit_spinning(count: int = _TORCH) -> None:
    """Limits for how many attempts threads wait before they sleep, in each OpenMP library that is loaded afterwards.

    The default is the limit for torch.

    Nothing changes if the process was started with GOMP_SPINCOUNT in its environment.
    """
    if _UNLIMITED[_COUNT] is None:
        os.environ[_COUNT] = str(count)
    # Each of our own threads that runs forwards gets some. Once there are more than cores, OpenMP by itself lets them
    # sleep almost at once, also in forwards that run alone: those of Gemma-3-270M took twice as long from then on.
    os.environ.setdefault(_POLICY, "ACTIVE")


def unlimited_environment() -> dict[str, str]:
    """Returns this process's environment without the limits, for processes that set their own."""
    others = {name: value for name, value in os.environ.items() if name not in _UNLIMITED}
    return others | {name: value for name, value in _UNLIMITED.items() if value is not None}
