"""One of the processes that share a model. The first one prints the logits of a few passes as JSON.

Arguments: the model's directory. The launcher's part of the environment is RANK, WORLD_SIZE and where to meet.
"""

import json
import sys
from pathlib import Path

from services.engines.engine import Row
from services.engines.habana.engine import HabanaEngine
from services.engines.spec import GaudiOptions
from tests.habana.models import fix_mistral


def main() -> None:
    """Runs a prompt, a copy, a rollback, and rows of two slots."""
    fix_mistral()
    engine = HabanaEngine(
        Path(sys.argv[1]),
        device="cpu",
        dtype="float32",
        threads=1,
        slot_count=2,
        gaudi=GaudiOptions(bucket_size=64, use_hpu_graphs=False),  # sums over processes cannot be recorded here
    )
    first = engine.forward([Row(0, 0, tuple(range(1, 41)), 39)])[0]
    engine.copy(0, 1, 20)
    one, other = engine.forward([Row(0, 30, (7, 8), 0), Row(1, 20, (9,), 0)])
    print(json.dumps([first.tolist(), one.tolist(), other.tolist()]))


if __name__ == "__main__":
    main()
