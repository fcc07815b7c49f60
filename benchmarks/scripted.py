"""Models that sleep instead of computing, to study speeds and distances that this machine does not have.

The target's text is a fixed sequence of random letters. The draft proposes each right token with a given probability.
Both use the sessions and schedulers of the services.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bridge.ports import Drafter, Proposal, Sync
from bridge.sampling.noise import token_keys
from bridge.sampling.sampler import Logits, Sampler, SamplingParameters
from bridge.text.models import Model, SpecialIds
from bridge.text.vocabulary import Vocabulary
from services.engines.engine import Row

END = 256
CONTEXT = 8192


@dataclass(frozen=True)
class Pair:
    """The speeds of a target and a draft. Milliseconds of: a 1-token forward of the target, a token of the draft, a
    round trip to the draft. `step`: what each further token adds to a forward, as a fraction. `jitter`: random part of
    all forwards. `acceptance`: probability that a draft token is right; `trace` ("1" or "0" per token) of the models
    `name` replaces it.
    """

    verify_ms: float = 40.0
    draft_ms: float = 4.0
    acceptance: float = 0.8
    round_trip_ms: float = 0.0
    step: float = 0.02
    jitter: float = 0.0
    trace: str = ""
    name: str = ""

    def is_right(self, seed: int, place: int) -> bool:
        """Returns whether the draft's token at `place` is right."""
        if self.trace:
            return self.trace[place % len(self.trace)] == "1"
        return is_right(seed, place, self.acceptance)

    def forward_ms(self, width: int) -> float:
        """Returns the milliseconds of a forward of the target with `width` tokens."""
        return self.verify_ms * (1 + self.step * (width - 1))


@cache
def tokenizer_json() -> bytes:
    """Returns a tokenizer with a token for each byte and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id_ for id_, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    text: str = tokenizer.to_str()
    return text.encode()


@cache
def model() -> Model:
    """Returns a model with that tokenizer."""
    vocabulary = Vocabulary(tokenizer_json())
    return Model("scripted", CONTEXT, vocabulary.size, vocabulary, SpecialIds(eos=(END,)))


def text(seed: int, count: int) -> list[int]:
    """Returns random ASCII letters as ids, so that each id is a whole character."""
    vocabulary, choose = model().vocabulary, random.Random(seed)
    letters = [vocabulary.byte_ids[ord("a") + index] for index in range(26)]
    return [choose.choice(letters) for _ in range(count)]


def _other(id_: int) -> int:
    """Returns another letter."""
    byte_ids = model().vocabulary.byte_ids
    return byte_ids[ord("a")] if id_ != byte_ids[ord("a")] else byte_ids[ord("b")]


def is_right(seed: int, position: int, acceptance: float) -> bool:
    """Returns whether the draft's token at `position` is right."""
    return random.Random(seed * 1_000_003 + position).random() < acceptance


class ScriptedEngine:
    """An engine whose forwards sleep for `forward_ms(width)` and predict `next_id(position)` at each position."""

    name, device, dtype, logit_tolerance = "scripted", "none", "float32", 0.0

    def __init__(self, forward_ms: Callable[[int], float], next_id: Callable[[int], int], jitter: float = 0.0) -> None:
        self._forward_ms, self._next, self._jitter = forward_ms, next_id, jitter
        self._random = random.Random(0)
        self.context_length, self.vocabulary_size = CONTEXT, model().vocabulary_size
        self.slot_count, self.cache_byte_count = 4, 0

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        end = time.perf_counter() + self.takes_ms(rows) / 1000
        tables = self.logits(rows)
        time.sleep(max(end - time.perf_counter(), 0.0))  # instead of computing
        return tables

    def takes_ms(self, rows: Sequence[Row]) -> float:
        """Returns the milliseconds of a forward, with new random jitter for each call."""
        milliseconds = self._forward_ms(sum(len(row.token_ids) - row.logits_from for row in rows))
        return milliseconds * self._random.uniform(1 - self._jitter, 1 + self._jitter)

    def logits(self, rows: Sequence[Row]) -> list[Logits]:
        """Returns the logits of a forward without sleeping."""
        tables = []
        for row in rows:
            table = np.zeros((len(row.token_ids) - row.logits_from, self.vocabulary_size), np.float32)
            for index in range(len(table)):
                table[index, self._next(row.keep + row.logits_from + index + 1)] = 10.0
            tables.append(table)
        return tables

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""


def engines(pair: Pair, seed: int, count: int) -> tuple[ScriptedEngine, ScriptedEngine]:
    """Returns the engines of target and draft for a text of `count` tokens."""
    truth = text(seed, count + 2 * CONTEXT // 8)

    def draft_id(position: int) -> int:
        # A random letter could be right by chance, so a wrong one is chosen on purpose.
        return truth[position] if pair.is_right(seed, position) else _other(truth[position])

    return (
        ScriptedEngine(pair.forward_ms, lambda position: truth[position], pair.jitter),
        ScriptedEngine(lambda width: pair.draft_ms, draft_id, pair.jitter),
    )


def sampler() -> Sampler:
    """Returns a greedy sampler."""
    keys = token_keys(model().vocabulary, model().special_ids.eos)
    return Sampler(
        SamplingParameters(temperature=0.0), 0, keys, np.empty(0, np.int64), frozenset({END}), confident=True
    )


class Distant:
    """Delays all messages to and from a draft by half a round trip, in order."""

    def __init__(self, draft: Drafter, round_trip_ms: float) -> None:
        self._draft, self._delay = draft, round_trip_ms / 2000
        self._tasks: list[asyncio.Task[None]] = []

    async def sync(self, sync: Sync) -> None:
        """See `Drafter`."""
        self._later(lambda: self._draft.sync(sync))

    async def grant(self, epoch: int, credit: int) -> None:
        """See `Drafter`."""
        self._later(lambda: self._draft.grant(epoch, credit))

    def _later(self, call: Callable[[], object]) -> None:
        async def run() -> None:
            await asyncio.sleep(self._delay)
            await call()  # type: ignore[misc]

        self._tasks.append(asyncio.create_task(run()))

    def close(self) -> None:
        """See `Drafter`."""

    async def proposals(self) -> AsyncIterator[Proposal]:
        """See `Drafter`."""
        arriving: asyncio.Queue[tuple[float, Proposal]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def read() -> None:
            async for proposal in self._draft.proposals():
                arriving.put_nowait((loop.time() + self._delay, proposal))

        reader = asyncio.create_task(read())
        try:
            while True:
                at, proposal = await arriving.get()
                await asyncio.sleep(max(at - loop.time(), 0))
                yield proposal
        finally:
            reader.cancel()
