"""What every rival takes and returns. Only the standard library may be imported here."""

import argparse
import ctypes
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

# The first values that each library's guide proposes.
LOOKUP_TOKENS = 10
LOOKUP_NGRAM = 3


@dataclass(frozen=True)
class Request:
    """Ids of the prompt, the maximum number of new tokens, and ids that end the answer."""

    prompt_ids: list[int]
    max_tokens: int
    stop_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """New ids, including one that ended them, and times since the request. A count is 0 if the library reports none."""

    token_ids: list[int]
    first_token_ns: int
    elapsed_ns: int
    pass_count: int = 0
    candidate_count: int = 0
    accepted_count: int = 0


@dataclass
class Clock:
    """Measures the time since its construction."""

    started: int = field(default_factory=time.perf_counter_ns)
    first_token_ns: int = 0

    def tokens(self) -> None:
        """Records that tokens have arrived."""
        self.first_token_ns = self.first_token_ns or self.elapsed_ns

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since the start."""
        return time.perf_counter_ns() - self.started


Rival: TypeAlias = Callable[[Request], Answer]
# Loads a library's model. Returns a description of the software, and what answers requests.
Load: TypeAlias = Callable[[argparse.Namespace], tuple[str, Rival]]


def gguf_of(options: argparse.Namespace) -> str:
    """Returns the path of the GGUF file. Raises `ValueError` if none was given."""
    if not options.gguf:
        raise ValueError("this rival needs --gguf")
    return str(options.gguf)


def end_with_parent() -> None:
    """Asks Linux to kill this process with its parent: while stopped, it would not notice the end of its input."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
