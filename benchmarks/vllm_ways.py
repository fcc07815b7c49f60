"""Switches between proposers inside one vLLM server, so that a benchmark can alternate them request by request.

The benchmark writes the number of a way into the file `way` of the folder `VLLM_WAYS`. This class, vLLM's proposer,
reads it in each step, and appends to the file `times`: way, rows, candidates and nanoseconds, each as uint64.
"""

import mmap
import os
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftbridge.guests.vllm import Proposer

PLAIN, OURS, WAITING = "no candidates", "draftbridge", "draftbridge, 100 ms"
LOCAL, LEARNING, ALWAYS = "draftbridge, local", "draftbridge, learning", "draftbridge, always"
# vLLM's own proposers: ngram with vLLM's defaults, ngram with shorter matches, suffix with vLLM's defaults. WAITING is
# our own with a longer deadline, LOCAL our own without a bridge, LEARNING the same with what earlier outputs taught.
# ALWAYS, for tests, lets the bridge believe that candidates cost nothing, and has a deadline that it keeps on a busy
# machine, too.
WAYS = (PLAIN, "ngram 5", "ngram 2-5", "suffix", OURS, WAITING, LOCAL, LEARNING, ALWAYS)
RECORD = struct.Struct("<4Q")


class Ways:
    """Asks the proposer whose number is in the file."""

    def __init__(self, vllm_config: Any) -> None:
        folder = Path(os.environ["VLLM_WAYS"])
        with (folder / "way").open("r+b") as file:
            self._way = mmap.mmap(file.fileno(), 1)
        self._times = (folder / "times").open("ab", buffering=0)
        self._ours = Proposer(vllm_config)
        self._local = Proposer(_with(vllm_config, bridge="local"))
        self._learning = Proposer(_with(vllm_config, bridge="local", engine="learning", sources="suffix,learned"))
        self._always = Proposer(_with(vllm_config, engine="always", deadline_ms="200"))
        if client := self._always._client:
            step = client.step
            client.step = lambda *args, **more: step(*args, **more | {"engine_seconds": 0.02})  # type: ignore[method-assign]
        self._deadline = self._ours._deadline
        self._ngrams = {1: _ngram(vllm_config, 5, 5, 5), 2: _ngram(vllm_config, 2, 5, self._ours._limit)}
        self._suffix = _suffix(vllm_config)

    def load_model(self, *arguments: Any) -> None:
        self._ours.load_model(*arguments)
        self._local.load_model(*arguments)
        self._learning.load_model(*arguments)
        self._always.load_model(*arguments)

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        way = self._way[0]
        began = time.perf_counter_ns()
        if way in self._ngrams:
            ngram = self._ngrams[way]
            found: list[list[int]] = ngram.propose(ngram.k, sampled, counts, tokens)
        elif WAYS[way] == "suffix" and self._suffix:
            # vLLM gives its own suffix proposer the whole batch; a class of ours must look it up in the caller.
            batch = sys._getframe(1).f_locals["self"].input_batch
            found = self._suffix.propose(self._suffix.num_speculative_tokens, batch, sampled)
        elif WAYS[way] in (OURS, WAITING):
            self._ours._deadline = 0.1 if WAYS[way] == WAITING else self._deadline
            found = self._ours.propose(sampled, counts, tokens)
        elif WAYS[way] in (LOCAL, LEARNING, ALWAYS):
            proposer = {LOCAL: self._local, LEARNING: self._learning, ALWAYS: self._always}[WAYS[way]]
            found = proposer.propose(sampled, counts, tokens)
        else:
            found = [[] for _ in sampled]
        elapsed = time.perf_counter_ns() - began
        self._times.write(RECORD.pack(way, len(sampled), sum(map(len, found)), elapsed))
        return found


def _with(vllm_config: Any, **settings: str) -> Any:
    """Returns vLLM's configuration with settings for the adapter."""
    names = ("speculative_config", "model_config", "parallel_config", "device_config")
    parts = {name: getattr(vllm_config, name) for name in names}
    return SimpleNamespace(additional_config={"draftbridge": settings}, **parts)


def _ngram(vllm_config: Any, least: int, most: int, count: int) -> Any:
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    speculative = SimpleNamespace(prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=count)
    names = ("model_config", "scheduler_config", "parallel_config")
    parts = {name: getattr(vllm_config, name) for name in names}
    return NgramProposer(SimpleNamespace(speculative_config=speculative, **parts))


def _suffix(vllm_config: Any) -> Any:
    """Returns vLLM's suffix proposer with vLLM's defaults; None if its library, arctic-inference, is missing."""
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    speculative = vllm_config.speculative_config
    names = [name for name in dir(speculative) if name.startswith("suffix_decoding_")]
    values = {name: getattr(speculative, name) for name in names}
    own = SimpleNamespace(num_speculative_tokens=speculative.num_speculative_tokens, **values)
    try:
        return SuffixDecodingProposer(SimpleNamespace(speculative_config=own, model_config=vllm_config.model_config))
    except ImportError:
        return None
