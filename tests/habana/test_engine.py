"""Tests the habana engine with optimum-habana's own classes on a CPU: static shapes, waits, options, refusals."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from habana_frameworks import observed

from bridge.errors import UnusableModel
from services.engines.engine import Row, measure, warm
from services.engines.fixed_width import FixedWidthEngine
from services.engines.habana.cache import SlotCache
from services.engines.habana.engine import HabanaEngine
from tests.habana.fresh import in_fresh_process
from tests.habana.models import FAMILIES, opened
from tests.habana.oracle import Oracle
from tests.support.engine_contract import expected, random_ids


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Oracle, Path]]:
    directory = tmp_path_factory.mktemp("llama")
    oracle = Oracle(FAMILIES["llama"] | {"num_hidden_layers": 1}, directory)  # recording a layer takes long
    yield oracle, directory
    oracle.close()


def work(engine: HabanaEngine, seed: int, count: int) -> int:
    """Runs a random workload: prompts, single tokens, candidates, rollbacks and copies, in any slots.

    Returns the number of passes whose logits are read.
    """
    read = 0
    choose = random.Random(seed)
    lengths = [0] * engine.slot_count
    for _ in range(count):
        rows = []
        for slot in choose.sample(range(engine.slot_count), choose.randint(1, engine.slot_count)):
            keep = choose.randint(0, lengths[slot])
            length = choose.choice([1, 1, 4, 9, 25, choose.randint(1, 256)])
            if keep + length <= engine.context_length:
                rows.append(Row(slot, keep, tuple(random_ids(choose.random(), length)), choose.randint(0, length)))
                lengths[slot] = keep + length
        if rows:
            engine.forward(rows)
            read += sum(1 for _, _, wanted in engine._shapes.passes(rows) if wanted)
        source, target = choose.sample(range(engine.slot_count), 2)
        engine.copy(source, target, lengths[source])
        lengths[target] = lengths[source]
    return read


@pytest.mark.parametrize("options", [{}, {"bucket_internal": True}, {"use_hpu_graphs": False}], ids=str)
def test_no_text_has_a_shape_that_was_not_warmed_up(llama: tuple[Oracle, Path], options: dict) -> None:
    """The workload creates no new graph and, with and without graphs, no operation with new shapes or numbers."""
    with observed.operations() as before:
        engine = opened(llama[1], **options)
        warm(engine, range(1, 26))
        measure(engine, all_logits=True)
    graphs = observed.graph_count
    with observed.operations() as after:
        work(engine, seed=0, count=60)
    assert len(after) > 20
    assert after - before == set()
    assert observed.graph_count == graphs


def test_warm_up_replays_each_graph(llama: tuple[Oracle, Path]) -> None:
    """The copies of inputs to a graph's own, which a replay makes, are small graphs that a Gaudi compiles too."""
    with observed.operations() as before:
        engine = opened(llama[1])
    with observed.operations() as after:
        work(engine, seed=1, count=10)
    assert {one for one in after - before if "copy_" in one[0]} == set()


def test_the_host_waits_only_for_the_result(llama: tuple[Oracle, Path]) -> None:
    engine = opened(llama[1])
    steps = observed.mark_step_count
    with observed.waits() as waits:
        engine.forward([Row(0, 0, (1, 2, 3), 3)])  # only caches
        assert waits == []
        for keep in range(3, 40):
            engine.forward([Row(0, keep, (5, 6, 7), 0)])
    assert waits == ["cpu"] * 37
    assert observed.mark_step_count >= steps + 38


def test_the_observer_sees_waits_and_new_shapes() -> None:
    """Shows that the two tests above can fail."""
    with observed.waits() as waits, observed.operations() as seen:
        one = torch.ones(3)
        assert one.sum().item() == 3
        assert bool((one > 0).any())
        one.to("cpu")
        one.to(torch.float64).to(device=torch.device("cpu"))
        one[one > 0]
        one[..., one > 0] = 0
        one[:2] + 1
    assert waits == ["item", "__bool__", "to", "to", "__getitem__", "__setitem__"]
    with observed.operations() as more:
        torch.ones(3)[:1] + 1
    assert more - seen


@pytest.mark.parametrize(
    "options",
    [
        {"limit_hpu_graphs": True},
        {"max_graphs": 2},
        {"use_hpu_graphs": False},
    ],
    ids=str,
)
def test_options_of_the_example_keep_the_logits(llama: tuple[Oracle, Path], options: dict) -> None:
    oracle, directory = llama
    graphs, bypassed = observed.graph_count, observed.bypass_count
    engine = opened(directory, **options)
    ids = random_ids(3, 70)
    rows = [Row(1, 0, tuple(ids[:60]), 59), Row(0, 0, (9, 8), 0)]
    first, _ = engine.forward(rows)
    last = engine.forward([Row(1, 60, tuple(ids[60:]), 0)])[0]
    reference = expected(oracle, ids)
    np.testing.assert_allclose(np.concatenate([first, last]), reference[59:], atol=1e-4)
    assert (observed.bypass_count > bypassed) == ("limit_hpu_graphs" in options)
    if "use_hpu_graphs" in options:
        assert observed.graph_count == graphs
    if "max_graphs" in options:
        assert observed.graph_count <= graphs + 4  # two of passes, two of copies


RECOMPUTE = {"flash_attention_recompute": True}
FAST = {"flash_attention_fast_softmax": True}


@pytest.mark.parametrize(
    ("family", "options", "modes"),
    [
        ("llama", {}, ("None", False)),
        ("llama", RECOMPUTE | FAST, ("fast", True)),
        ("qwen2", RECOMPUTE, ("fp32", True)),
        ("mistral", RECOMPUTE, ("None", True)),
        ("gemma", RECOMPUTE, ("None", True)),
        ("gemma2", {}, ("None", False)),
    ],
    ids=str,
)
def test_fused_attention_runs_in_the_chosen_modes(family: str, options: dict, modes: tuple, tmp_path: Path) -> None:
    oracle = Oracle(FAMILIES[family] | {"attn_logit_softcapping": None}, tmp_path)
    engine = opened(tmp_path, use_hpu_graphs=False, use_flash_attention=True, **options)
    observed.fused_calls.clear()
    ids = random_ids(3, 40)
    np.testing.assert_allclose(engine.forward([Row(0, 0, tuple(ids), 0)])[0], expected(oracle, ids), atol=1e-4)
    assert observed.fused_calls == [modes] * FAMILIES[family]["num_hidden_layers"]
    oracle.close()


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("gemma2", {"use_flash_attention": True}, "use_flash_attention"),  # its attention has a soft cap
        ("gemma2", {"attn_softmax_bf16": True}, "attn_softmax_bf16"),
        ("llama", {"attn_softmax_bf16": True, "use_flash_attention": True}, "attn_softmax_bf16"),
        ("qwen2", {"use_flash_attention": True} | FAST, "flash_attention_fast_softmax"),
    ],
    ids=str,
)
def test_options_without_their_effect_are_refused(family: str, options: dict, named: str, tmp_path: Path) -> None:
    Oracle(FAMILIES[family], tmp_path).close()
    with pytest.raises(UnusableModel, match=f"leave out --{named.replace('_', '-')}"):
        opened(tmp_path, use_hpu_graphs=False, **options)


@pytest.mark.parametrize(("options", "dtype"), [({}, "torch.float32"), ({"attn_softmax_bf16": True}, "torch.bfloat16")])
def test_the_softmax_of_attention_has_the_chosen_dtype(llama: tuple[Oracle, Path], options: dict, dtype: str) -> None:
    """On a CPU, both give the same bits: the kernel for bfloat16 computes in float32."""
    engine = opened(llama[1], "bfloat16", use_hpu_graphs=False, **options)
    with observed.operations() as seen:
        engine.forward([Row(0, 0, (1, 2, 3), 0)])
    assert {one[-1] for one in seen if "softmax" in one[0]} == {dtype}


def test_bfloat16_is_the_default_and_close(llama: tuple[Oracle, Path]) -> None:
    oracle, directory = llama
    engine = HabanaEngine(directory, device="cpu", threads=1, slot_count=1)
    logits = engine.forward([Row(0, 0, (1, 2, 3, 4), 0)])[0]
    np.testing.assert_allclose(logits, expected(oracle, [1, 2, 3, 4]), atol=0.05)
    assert engine.dtype == "bfloat16"
    assert engine.cache_byte_count == 256 * 2 * 2 * 8 * 2  # tokens, keys and values, heads, size, bytes


def test_a_missing_gaudi_is_named(llama: tuple[Oracle, Path]) -> None:
    with pytest.raises(UnusableModel, match="there is no device hpu"):
        HabanaEngine(llama[1])


def test_a_full_memory_is_named(llama: tuple[Oracle, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(cache: SlotCache, cell_count: int) -> None:
        raise RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB")

    monkeypatch.setattr(SlotCache, "allocate", allocate)
    with pytest.raises(UnusableModel, match=r"3 sequences do not fit .*896.*: decrease --kv-memory or --slots"):
        opened(llama[1])


def test_a_window_that_a_class_ignores_limits_the_context(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    oracle = Oracle(FAMILIES["qwen2"] | windows, tmp_path)
    engine = opened(tmp_path)
    assert engine.context_length == 48
    ids = random_ids(4, 48)
    np.testing.assert_allclose(engine.forward([Row(0, 0, tuple(ids), 0)])[0], expected(oracle, ids), atol=1e-4)
    oracle.close()


def opened_with_a_wrong_class(directory: Path) -> str:
    """Returns why a model is refused whose class in optimum-habana computes something else."""
    from optimum.habana.transformers.models.llama.modeling_llama import GaudiLlamaMLP

    GaudiLlamaMLP.post_mlp_forward = lambda self, given: given * 1.1
    with pytest.raises(UnusableModel) as raised:
        opened(directory, use_hpu_graphs=False)
    return str(raised.value)


def test_a_class_that_computes_something_else_is_refused(llama: tuple[Oracle, Path]) -> None:
    assert "from the model's own" in in_fresh_process(opened_with_a_wrong_class, llama[1])


def test_logits_of_fixed_widths_do_not_depend_on_the_batch(llama: tuple[Oracle, Path]) -> None:
    """As `--deterministic` serves the engine."""
    engine = FixedWidthEngine(opened(llama[1], "bfloat16"))
    ids = tuple(random_ids(5, 40))
    alone = engine.forward([Row(0, 0, ids, 0)])[0]
    first, _ = engine.forward([Row(1, 0, ids[:25], 0), Row(2, 0, (9, 8), 0)])
    engine.copy(1, 0, 25)
    rest = [engine.forward([Row(0, keep, ids[keep : keep + 3], 0)])[0] for keep in range(25, 40, 3)]
    np.testing.assert_array_equal(np.concatenate([first, *rest]), alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_static_shapes_and_waits_for_results_only(family: str, tmp_path: Path) -> None:
    """Runs without graphs, which hide the operations of the model's class."""
    Oracle(FAMILIES[family], tmp_path).close()
    with observed.operations() as before:
        engine = opened(tmp_path, use_hpu_graphs=False)
        warm(engine, range(1, 26))
        measure(engine, all_logits=True)
    assert sum(name.endswith("_cos_cached") for name, _ in engine._model.named_buffers()) == 1, "one for all layers"
    with observed.operations() as after, observed.waits() as waits:
        read = work(engine, seed=0, count=15)
    assert after - before == set()
    assert waits == ["cpu"] * read


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"model_type": "gpt2", "vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4}, {}, "it lacks"),
        (FAMILIES["gemma"], {"flash_attention_fast_softmax": True}, "leave out --flash-attention-fast-softmax"),
    ],
    ids=["no fixed slots", "no such option"],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(
    config: dict, options: dict, words: str, tmp_path: Path
) -> None:
    oracle = Oracle(config, tmp_path)
    with pytest.raises(UnusableModel, match=words):
        opened(tmp_path, **options)
    oracle.close()
