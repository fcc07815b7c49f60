"""A model server whose model computes nothing, so that only the services cost time.

    python -m benchmarks.scripted_service --role target|draft [--forward-ms 2] [--acceptance 0.8] [--slots 64]

It uses the servicers, sessions and scheduler of a real model server, and prints its address. Each token is a function
of the three tokens before it and of its position, so that a wrong token changes the rest of the text: `expected`
returns the right text of a prompt.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from benchmarks import scripted
from bridge.sampling.sampler import Logits
from services.cli.processes import announce
from services.config import Role, ServerConfig
from services.engines.engine import Row
from services.engines.observer import SchedulerObserver
from services.engines.scheduler import Scheduler
from services.metrics import ModelMetrics
from services.model.health import ModelHealth
from services.model.host import LoadedModel
from services.model.server import register
from services.rpc.insight import Insight
from services.rpc.metrics_server import serving_metrics
from services.rpc.server import Server, stop_event
from services.store.files import ModelFiles

_LETTERS = 26


def next_letter(ids: Sequence[int]) -> int:
    """Returns the id that follows a text."""
    data = np.asarray([len(ids), *ids[-3:]], np.uint32).tobytes()
    return scripted.model().vocabulary.byte_ids[ord("a") + crc32(data) % _LETTERS]


def expected(prompt: str, token_count: int) -> str:
    """Returns the text that the model generates after a prompt."""
    vocabulary = scripted.model().vocabulary
    ids = [vocabulary.byte_ids[byte] for byte in prompt.encode()]
    for _ in range(token_count):
        ids.append(next_letter(ids))
    return b"".join(map(vocabulary.token_bytes, ids[-token_count:])).decode()


class ScriptedServiceEngine:
    """Predicts `next_letter` at each position, with probability `acceptance`, else another letter.

    A forward sleeps for `forward_ms`. Keeps the ids of each slot, so that a wrong `keep` changes the text.
    """

    name, device, dtype, logit_tolerance, cache_byte_count = "scripted", "none", "float32", 0.0, 0

    def __init__(self, slot_count: int, forward_ms: float, acceptance: float) -> None:
        self.slot_count, self.context_length = slot_count, scripted.CONTEXT
        self.vocabulary_size = scripted.model().vocabulary_size
        self._seconds, self._acceptance = forward_ms / 1000, acceptance
        self._slots: list[list[int]] = [[] for _ in range(slot_count)]

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        end = time.perf_counter() + self._seconds
        tables = [self._logits(row) for row in rows]
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)  # instead of computing
        return tables

    def _logits(self, row: Row) -> Logits:
        ids = self._slots[row.slot]
        assert row.keep <= len(ids), "a row keeps more than its slot holds"
        del ids[row.keep :]
        table = np.zeros((len(row.token_ids) - row.logits_from, self.vocabulary_size), np.float32)
        for index, id_ in enumerate(row.token_ids):
            ids.append(id_)
            if index >= row.logits_from:
                table[index - row.logits_from, self._next(ids)] = 10.0
        return table

    def _next(self, ids: Sequence[int]) -> int:
        right = next_letter(ids)
        if self._acceptance == 1.0 or scripted.is_right(right, len(ids), self._acceptance):
            return right
        byte_ids = scripted.model().vocabulary.byte_ids
        return byte_ids[ord("a")] if right != byte_ids[ord("a")] else byte_ids[ord("b")]

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        self._slots[target] = self._slots[source][:token_count]


def load(name: str, engine: ScriptedServiceEngine, queue_limit: int, observer: SchedulerObserver) -> LoadedModel:
    """Returns a model that can be served."""
    model = scripted.model()
    files = ModelFiles(scripted.tokenizer_json(), model.vocabulary, model.special_ids, "", "1")
    described = files.describe(name, engine.context_length, engine.vocabulary_size)
    return LoadedModel(files, engine, described, Scheduler(lambda: engine, queue_limit, observer))


def main() -> None:
    """Serves until stopped, or until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", type=Role, choices=tuple(Role), required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--forward-ms", type=float, default=0.0)
    parser.add_argument("--acceptance", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--queue", type=int, default=1024)
    parser.add_argument("--tls-certificate", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--grace", type=float, default=20.0)
    parser.add_argument("--metrics", default="127.0.0.1:0")
    parser.add_argument("--until-stdin-closes", action="store_true", help="always the case")
    arguments = parser.parse_args()
    config = ServerConfig(tls_certificate=arguments.tls_certificate, tls_key=arguments.tls_key, grace=arguments.grace)
    metrics = ModelMetrics()
    engine = ScriptedServiceEngine(arguments.slots, arguments.forward_ms, arguments.acceptance)
    loaded = load(arguments.name or f"scripted-{arguments.role.value}", engine, arguments.queue, metrics)
    metrics.watch(loaded.scheduler)

    async def serve() -> None:
        server = Server(arguments.listen, config, Insight(metrics))
        grammars = register(server, loaded, arguments.role)
        health = ModelHealth(loaded.scheduler)
        with serving_metrics(ServerConfig(metrics=arguments.metrics), metrics.registry) as url:
            print(f"metrics at {url}", flush=True)
            await server.run_until(stop_event(True), announce, health)
        grammars.close()
        loaded.scheduler.close()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
