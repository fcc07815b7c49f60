"""The four real models are served by every engine that can run them, in every dtype and kind of weights."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bridge.errors import UnusableModel
from services.engines.engine import Row
from services.engines.registry import engine_spec
from services.engines.spec import Dtype, EngineOptions, Weights
from services.engines.torch.model import load_model
from services.store.resolve import resolve

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(1200)]

MODELS = ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct")
TEXT = "def is_even(number):\n    return number % 2 =="
# With the places among the best tokens that the reference's best one may have: weights in fewer bits may swap two.
WAYS = [
    ("torch", Dtype.FLOAT32, Weights.AUTO, 1),
    ("torch", Dtype.BFLOAT16, Weights.AUTO, 2),
    ("torch", Dtype.FLOAT16, Weights.AUTO, 2),
    ("torch", Dtype.AUTO, Weights.INT8, 3),
    ("openvino", Dtype.FLOAT32, Weights.FULL, 1),
    ("openvino", Dtype.AUTO, Weights.FULL, 2),
    ("openvino", Dtype.AUTO, Weights.INT8, 3),
    ("openvino", Dtype.AUTO, Weights.INT4, 5),
    ("ik_llama", Dtype.AUTO, Weights.AUTO, 2),
    ("llamacpp", Dtype.AUTO, Weights.AUTO, 2),
]
# Activations reach 100,000 there, and float16 ends at 65,504.
OVERFLOWS = {("gemma-3-270m", Dtype.FLOAT16)}


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[int], int]]:
    """Yields a model's name, the ids of a text, and the best next id by transformers in float32."""
    directory = resolve(request.param, print)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    model = load_model(directory, torch.float32).eval()
    with torch.inference_mode():
        best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    del model
    gc.collect()
    yield request.param, ids, best


@pytest.mark.parametrize(
    ("engine", "dtype", "weights", "places"), WAYS, ids=[f"{way[0]}-{way[1].value}-{way[2].value}" for way in WAYS]
)
def test_every_engine_serves_a_real_model(
    reference: tuple[str, list[int], int], engine: str, dtype: Dtype, weights: Weights, places: int
) -> None:
    """Opening includes the self-test of engines that have one, which once refused the largest model in bfloat16."""
    name, ids, best = reference
    gc.collect()  # the model of the case before, which takes 7 GB
    spec = engine_spec(engine)
    if not spec.installed:  # engines other than torch are extras
        pytest.skip(f"{engine} is not installed")
    options = EngineOptions(device="cpu", dtype=dtype, weights=weights, slot_count=2, cache_byte_limit=1 << 28)
    if (name, dtype) in OVERFLOWS:
        with pytest.raises(UnusableModel, match="not numbers in float16: use --dtype bfloat16 or float32"):
            spec.open(spec.prepare(name, options, print), options)
        return
    opened = spec.open(spec.prepare(name, options, print), options)
    logits = opened.forward([Row(0, 0, tuple(ids), len(ids) - 1)])[0][-1]
    assert best in np.argsort(logits)[-places:]
