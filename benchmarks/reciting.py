"""A model server whose model recites a text without computing, so that only the services cost time.

    python -m benchmarks.reciting --text FILE --tokenizer tokenizer.json --role target|draft [--acceptance 0.8]

It uses the servicers, sessions and scheduler of a real model server, and prints its address.
"""

import argparse
import asyncio
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.scripted import is_right
from bridge.sampling.sampler import Logits
from bridge.text.models import Model, SpecialIds
from bridge.text.vocabulary import Vocabulary
from services.cli.processes import announce
from services.config import Role
from services.engines.engine import Row
from services.engines.scheduler import Scheduler
from services.model.host import LoadedModel
from services.model.server import register
from services.rpc.server import Server, stop_event
from services.store.files import ModelFiles

SLOTS, CONTEXT = 4, 1 << 17
# Bytes that are encoded to find the next token.
_AHEAD = 48
_SEED = 1


class RecitingEngine:
    """Predicts the next token of its text at the byte offset of the sequence, right with probability `acceptance`."""

    name, device, dtype, logit_tolerance, cache_byte_count = "reciting", "none", "float32", 0.0, 0
    slot_count, context_length = SLOTS, CONTEXT

    def __init__(self, vocabulary: Vocabulary, text: bytes, acceptance: float = 1.0) -> None:
        self.vocabulary_size = vocabulary.size
        self._vocabulary, self._text, self._acceptance = vocabulary, text, acceptance
        self._ends: list[list[int]] = [[] for _ in range(SLOTS)]
        self.next_id = cache(self._next_id)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        return [self._logits(row) for row in rows]

    def _logits(self, row: Row) -> Logits:
        ends = self._ends[row.slot]
        del ends[row.keep :]
        for id_ in row.token_ids:
            ends.append((ends[-1] if ends else 0) + len(self._vocabulary.token_bytes(id_)))
        table = np.zeros((len(row.token_ids) - row.logits_from, self.vocabulary_size), np.float32)
        for index in range(len(table)):
            table[index, self.next_id(ends[index - len(table)])] = 10.0
        return table

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        self._ends[target] = self._ends[source][:token_count]

    def _next_id(self, offset: int) -> int:
        ids = self._vocabulary.pieces(self._text[offset : offset + _AHEAD]).ids
        if len(ids) > 1 and not is_right(_SEED, offset, self._acceptance):
            return ids[1] if ids[1] != ids[0] else self._vocabulary.byte_ids[ord("#")]
        return ids[0] if ids else self._vocabulary.byte_ids[ord("#")]


def load(name: str, tokenizer_json: bytes, text: bytes, acceptance: float) -> LoadedModel:
    """Returns a model with that tokenizer and no control tokens that recites the text."""
    vocabulary = Vocabulary(tokenizer_json)
    engine = RecitingEngine(vocabulary, text, acceptance)
    files = ModelFiles(tokenizer_json, vocabulary, SpecialIds(), "", hashlib.sha256(text).hexdigest())
    model: Model = files.describe(name, engine.context_length, engine.vocabulary_size)
    return LoadedModel(files, engine, model, Scheduler(lambda: engine))


def main() -> None:
    """Serves until stopped, or until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--role", type=Role, choices=(Role.TARGET, Role.DRAFT), required=True)
    parser.add_argument("--acceptance", type=float, default=1.0)
    arguments = parser.parse_args()
    tokenizer_json, text = arguments.tokenizer.read_bytes(), arguments.text.read_bytes()
    loaded = load(f"reciting-{arguments.role.value}", tokenizer_json, text, arguments.acceptance)

    async def serve() -> None:
        server = Server("127.0.0.1:0")
        register(server, loaded, arguments.role)
        await server.run_until(stop_event(True), announce)
        loaded.scheduler.close()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
