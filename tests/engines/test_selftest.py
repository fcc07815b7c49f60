"""Right engines pass the self-test before they are served, in any dtype, and broken ones do not."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines import selftest
from services.engines.engine import Row
from services.engines.selftest import SelfTest, distance
from services.engines.torch import cache as torch_cache
from services.engines.torch import exact, invariant
from services.engines.torch.engine import TorchEngine
from services.engines.torch.model import load_model
from services.engines.torch.packed import computes_bfloat16
from services.store.resolve import resolve
from tests.support.depth import DEEP
from tests.support.engine_contract import FAMILIES, LLAMA_LIKE, saved

DTYPES = ("float32", "bfloat16", "float16")
# Weights so large that attention to wrong positions changes the result, as in a trained model.
CONFIG = transformers.MistralConfig(**LLAMA_LIKE, initializer_range=0.3, sliding_window=6)


# As deep as real models, with weights that make activations as large as theirs: a hundred times the embeddings.
DEEP_MODEL = LLAMA_LIKE | {
    "hidden_size": 96,
    "num_hidden_layers": 24,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "cohere": transformers.CohereConfig(**DEEP_MODEL),
    "glm": transformers.GlmConfig(**DEEP_MODEL, head_dim=24),
    "gpt_neox": transformers.GPTNeoXConfig(**{**DEEP_MODEL, "num_key_value_heads": 4}),
    "granite": transformers.GraniteConfig(**DEEP_MODEL),
    "helium": transformers.HeliumConfig(**DEEP_MODEL, head_dim=24),
    "nemotron": transformers.NemotronConfig(**DEEP_MODEL),
    "olmo": transformers.OlmoConfig(**DEEP_MODEL),
    "olmo2": transformers.Olmo2Config(**DEEP_MODEL),
    "phi": transformers.PhiConfig(**DEEP_MODEL),
    "smollm3": transformers.SmolLM3Config(**DEEP_MODEL),
    "stablelm": transformers.StableLmConfig(**DEEP_MODEL),
    "starcoder2": transformers.Starcoder2Config(**DEEP_MODEL),
}
# Unless there is time for all, three of four architectures are tested, each in one dtype.
SERVED = [
    (name, dtype)
    for at, name in enumerate(ARCHITECTURES)
    for dtype in (DTYPES if DEEP else DTYPES[at % 3 : at % 3 + 1] if at % 4 else ())
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("self_test")
    saved(CONFIG, path)
    return path


@pytest.fixture(scope="module")
def deep_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep_self_test")
    saved(transformers.MistralConfig(**DEEP_MODEL, sliding_window=6), path)
    return path


def _mask(change: Callable[[torch.Tensor, Row], Any]) -> Any:
    own = torch_cache.RaggedBatch._mask

    def changed(self: Any, index: int, *others: Any) -> torch.Tensor | None:
        mask = own(self, index, *others)
        if mask is not None:
            mask = mask.clone()
            change(mask, self._rows[index])
        return mask

    return torch_cache.RaggedBatch, "_mask", changed


def _scoring(change: Callable[[Any], Any]) -> Any:
    own = torch_cache.RaggedBatch.attend

    def changed(self: Any, layer: int, query: Any, key: Any, value: Any, scoring: Any) -> torch.Tensor:
        return own(self, layer, query, key, value, change(scoring))

    return torch_cache.RaggedBatch, "attend", changed


def _keep(more: int) -> Any:
    own = TorchEngine.forward

    def changed(self: Any, rows: Sequence[Row]) -> list[Logits]:
        # Only after a rejected token: row 0, the second time.
        return own(self, [replace(row, keep=row.keep + more) if row.slot == 0 and row.keep else row for row in rows])

    return TorchEngine, "forward", changed


def _positions(change: Callable[[int], int]) -> Any:
    own = TorchEngine._tensors

    def changed(self: Any, ids: list[int], positions: list[int], *wanted: list[int]) -> list[torch.Tensor]:
        return own(self, ids, [change(position) for position in positions], *wanted)

    return TorchEngine, "_tensors", changed


def _copy(source_of: Callable[[int], int]) -> Any:
    own = TorchEngine.copy

    def changed(self: Any, source: int, target: int, token_count: int) -> None:
        # The ids that were in the slot before.
        self.forward([Row(target, 0, tuple(range(1, 1 + token_count)), token_count)])
        if source_of(token_count):
            own(self, source, target, source_of(token_count))

    return TorchEngine, "copy", changed


MUTANTS = {
    "later tokens are seen": _mask(lambda mask, row: mask.zero_()),
    "the last cached token is not seen": _mask(
        lambda mask, row: mask[:, : -len(row.token_ids)][:, -1:].fill_(-torch.inf)
    ),
    "no window": _scoring(lambda scoring: replace(scoring, window=0)),
    "a window of one more": _scoring(lambda scoring: replace(scoring, window=scoring.window + 1)),
    "scores a fifth too large": _scoring(lambda scoring: replace(scoring, scaling=1.2 * scoring.scaling)),
    "a rejected token stays": _keep(1),
    "one token too few is kept": _keep(-1),
    "positions from the cache on are one too high": _positions(lambda position: position + (position > 7)),
    "no positions": _positions(lambda position: 0),
    "a copied slot lacks a token": _copy(lambda token_count: token_count - 1),
    "nothing is copied": _copy(lambda token_count: 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_engine_is_far_from_refused(directory: Path, dtype: str) -> None:
    """The engine passes even at half the tolerance."""
    self_test = SelfTest.of(load_model(directory, getattr(torch, dtype)).eval())
    replace(self_test, tolerance=self_test.tolerance / 2).check(TorchEngine(directory, dtype=dtype, slot_count=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", ["no window", "a window of one more"])
def test_a_window_longer_than_the_texts_is_tested(
    dtype: str, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(transformers.MistralConfig(**LLAMA_LIKE, initializer_range=0.3, sliding_window=100), tmp_path)
    TorchEngine(tmp_path, dtype=dtype, slot_count=2)
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(tmp_path, dtype=dtype, slot_count=2)


@pytest.mark.parametrize("window", [6, 100])
def test_batch_invariant_passes_with_another_window_are_not_used(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(transformers.MistralConfig(**LLAMA_LIKE, initializer_range=0.3, sliding_window=window), tmp_path)
    engine = TorchEngine(tmp_path, dtype="float32", slot_count=2)
    assert engine.make_invariant()
    own = invariant.BlockBatch.attend

    def attend(self: Any, layer: int, query: Any, key: Any, value: Any, scoring: Any) -> torch.Tensor:
        return own(self, layer, query, key, value, replace(scoring, window=scoring.window + 1))

    monkeypatch.setattr(invariant.BlockBatch, "attend", attend)
    assert not engine.make_invariant()
    assert engine.logit_tolerance


@pytest.mark.parametrize(("architecture", "dtype"), SERVED)
def test_a_deep_model_of_any_architecture_is_served(architecture: str, dtype: str, tmp_path: Path) -> None:
    saved(ARCHITECTURES[architecture], tmp_path)
    self_test = SelfTest.of(load_model(tmp_path, getattr(torch, dtype)).eval())
    replace(self_test, tolerance=self_test.tolerance / 2).check(TorchEngine(tmp_path, dtype=dtype, slot_count=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_engine_is_refused(directory: Path, dtype: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(directory, dtype=dtype, slot_count=2)


@pytest.mark.parametrize("width", [1, 4, 16])
def test_forwards_of_other_widths_are_compared_too(
    directory: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is compiled for one width may be wrong while all others are right."""
    engine, own = TorchEngine(directory, dtype="float32", slot_count=2), TorchEngine.forward

    def wrong(self: Any, rows: Sequence[Row]) -> list[Logits]:
        factor = -1 if [len(row.token_ids) for row in rows] == [width] else 1
        return [factor * logits for logits in own(self, rows)]

    monkeypatch.setattr(TorchEngine, "forward", wrong)
    self_test = SelfTest.of(load_model(directory, torch.float32).eval())
    self_test.check(engine)
    self_test.check(engine, [one for one in (1, 2, 4, 8, 16) if one != width])
    with pytest.raises(ValueError, match="logits differ"):
        self_test.check(engine, (1, 2, 4, 8, 16))


@pytest.mark.parametrize("dtype", DTYPES if DEEP else DTYPES[1:2])
@pytest.mark.parametrize("mutant", list(MUTANTS)[:: 1 if DEEP else 3])
def test_the_noise_of_a_deep_model_hides_no_error(
    deep_directory: Path, dtype: str, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(deep_directory, dtype=dtype, slot_count=2)


def test_an_error_that_rounding_hides_is_seen_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys as large as those of Qwen2.5-Coder-0.5B make attention scores imprecise in bfloat16."""
    model = saved(transformers.Qwen2Config(**LLAMA_LIKE, initializer_range=0.3), tmp_path)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(std=30.0)
    model.save_pretrained(tmp_path)
    TorchEngine(tmp_path, dtype="bfloat16", slot_count=2)
    monkeypatch.setattr(*MUTANTS["scores a fifth too large"])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(tmp_path, dtype="bfloat16", slot_count=2)
    monkeypatch.setattr("services.engines.torch.engine.first_layers", lambda model: None)
    TorchEngine(tmp_path, dtype="bfloat16", slot_count=2)


@pytest.mark.parametrize("architecture", [*FAMILIES, *(ARCHITECTURES if DEEP else ())])
def test_first_layers_of_any_architecture_are_copied(architecture: str, tmp_path: Path) -> None:
    saved((FAMILIES | ARCHITECTURES)[architecture], tmp_path)
    model = load_model(tmp_path, torch.bfloat16).eval()
    before, text = (str(model), model.config.to_dict()), torch.arange(1, 9)[None]
    with torch.inference_mode():
        logits = model(text).logits
        copy = exact.first_layers(model)
        assert copy is not None and copy.dtype is torch.float32
        kinds = set(getattr(model.config, "layer_types", None) or ())
        assert set(getattr(copy.config, "layer_types", None) or ()) == kinds
        assert sum(one.numel() for one in copy.parameters()) <= sum(one.numel() for one in model.parameters())
        assert (str(model), model.config.to_dict()) == before, "the model is as it was"
        assert torch.equal(model(text).logits, logits)


def test_a_copy_that_takes_much_memory_is_not_made(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_MAX_BYTES", 10_000)
    model = load_model(directory, torch.bfloat16).eval()
    assert exact.first_layers(model) is None
    assert len(model.model.layers) == CONFIG.num_hidden_layers


def test_a_copy_that_does_not_run_is_not_held_against_the_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, sizes = TorchEngine._make_room, list[str]()

    def full(self: TorchEngine, limit: int) -> None:
        sizes.append(self.dtype)
        if self.dtype == "float32":
            raise MemoryError
        own(self, limit)

    monkeypatch.setattr(TorchEngine, "_make_room", full)
    TorchEngine(directory, dtype="bfloat16", slot_count=2)
    assert sizes == ["float32", "bfloat16"]


@pytest.mark.zoo
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if "window" not in mutant])
def test_a_broken_engine_is_refused_with_a_real_model(dtype: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to bfloat16 changes this model's logits by 5%, as much as some errors do."""
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(resolve("qwen2.5-coder-0.5b-instruct", print), dtype=dtype, slot_count=2)


def test_a_model_that_overflows_is_refused_with_a_dtype_that_does_not(tmp_path: Path) -> None:
    model = saved(CONFIG, tmp_path)
    model.model.norm.weight.data.fill_(6e4)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnusableModel, match="not numbers in float16: use --dtype bfloat16 or float32"):
        TorchEngine(tmp_path, dtype="float16")
    TorchEngine(tmp_path, dtype="bfloat16")
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnusableModel, match="not numbers in float32: its weights are damaged"):
        TorchEngine(tmp_path, dtype="float32")


def test_a_model_whose_scores_exceed_float16_before_they_are_scaled_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(CONFIG, tmp_path)
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight.data.mul_(150.0)
    model.save_pretrained(tmp_path)
    own = load_model(tmp_path, torch.float16).eval()
    assert not own(torch.arange(1, 17)[None]).logits.isfinite().all()
    TorchEngine(tmp_path, dtype="float16", slot_count=2)
    monkeypatch.setattr(*MUTANTS["later tokens are seen"])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(tmp_path, dtype="float16", slot_count=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_is_compared_also_where_squares_of_logits_overflow(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(CONFIG, tmp_path)
    model.model.norm.weight.data.fill_(1e30)
    model.save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, dtype=dtype, slot_count=2)
    if dtype == "float32" or computes_bfloat16():
        assert engine.make_invariant()
    monkeypatch.setattr(*MUTANTS["no positions"])
    with pytest.raises(UnusableModel, match="logits differ"):
        TorchEngine(tmp_path, dtype=dtype, slot_count=2)


def test_a_distance_is_the_same_at_any_scale_and_not_a_number_where_logits_are_not() -> None:
    own, logits = np.random.default_rng(0).normal(size=(2, 3, 50)).astype(np.float32)
    plain = distance(logits, own)
    assert 1 < plain < 2
    for exponent in (-60, 10, 70, 120):
        assert distance(np.ldexp(logits, exponent), np.ldexp(own, exponent)) == plain
    for wrong in (np.inf, np.nan):
        logits[1, 7] = wrong
        assert not distance(logits, own) < 1e30


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path: Path) -> None:
    saved(CONFIG, tmp_path)
    tokenizer = Tokenizer(WordLevel({"<s>": 7, "a": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    without = SelfTest.of(load_model(tmp_path, torch.float32).eval()).texts
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = SelfTest.of(load_model(tmp_path, torch.float32).eval()).texts
    assert [text[0] for text in texts] == [7, 7] and without[0][0] != 7


@pytest.mark.parametrize(
    ("first", "are_prose"), [(3, True), (CONFIG.vocab_size - 5, False)], ids=["known", "too large"]
)
def test_texts_are_prose_if_the_model_has_the_tokens(first: int, are_prose: bool, tmp_path: Path) -> None:
    saved(CONFIG, tmp_path)
    words = {word: first + at for at, word in enumerate(dict.fromkeys(re.findall(r"\w+|[^\w\s]", selftest._PROSE)))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="The"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    one, other = SelfTest.of(load_model(tmp_path, torch.float32).eval()).texts
    ids = tuple(tokenizer.encode(selftest._PROSE).ids)
    assert one[:4] == other[:4] and one != other and max(*one, *other) < CONFIG.vocab_size
    assert (one == ids[:16] and other[4:] == ids[16:28]) is are_prose


def test_a_proof_leaves_the_model_as_it_was(directory: Path) -> None:
    model = load_model(directory, torch.bfloat16).eval()
    first, second = SelfTest.of(model), SelfTest.of(model)
    assert first.texts == second.texts
    assert first.tolerance == second.tolerance
    assert (first.expected == second.expected).all()
    assert not any(part._forward_hooks for part in model.modules())
