"""The contract of all engines, tested against transformers in float32: a class that each engine's tests inherit."""

import random
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from draftbridge import Client
from services.cli.processes import fleet
from services.engines.engine import Row
from tests.support.depth import DEEP, examples

SMALL = {"vocab_size": 120, "max_position_embeddings": 256}

LLAMA_LIKE = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
FAMILIES = {
    "llama": transformers.LlamaConfig(**LLAMA_LIKE),
    "mistral": transformers.MistralConfig(**LLAMA_LIKE, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**LLAMA_LIKE),
    "qwen3": transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8),
    "gemma3": transformers.Gemma3TextConfig(**LLAMA_LIKE, head_dim=8, sliding_window=8, sliding_window_pattern=3),
    "phi3": transformers.Phi3Config(**LLAMA_LIKE, pad_token_id=0),
    "gpt2": transformers.GPT2Config(vocab_size=120, n_positions=256, n_embd=32, n_layer=2, n_head=4),
    "opt": transformers.OPTConfig(
        vocab_size=120, max_position_embeddings=256, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, word_embed_proj_dim=32,
    ),
    # A sliding window that only the mask shows.
    "phimoe": transformers.PhimoeConfig(**LLAMA_LIKE, sliding_window=8, num_local_experts=4, pad_token_id=0),
    # Soft-capped attention scores (gemma2) and attention sinks (gpt_oss).
    "gemma2": transformers.Gemma2Config(
        **LLAMA_LIKE, head_dim=8, sliding_window=8, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gpt_oss": transformers.GptOssConfig(
        **LLAMA_LIKE, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN
    ),
    "gpt_bigcode": transformers.GPTBigCodeConfig(vocab_size=120, n_positions=256, n_embd=32, n_layer=2, n_head=4),
}  # fmt: skip

# Rows that run together with `Row(1, 3, (10,), 0)`, and copies (source, target, tokens), that an engine with three
# slots of 256 tokens and 120 ids refuses.
INVALID_ROWS = [
    Row(0, 0, (1, 120), 0),  # an id beyond the vocabulary
    Row(0, 0, (1, -1), 0),
    Row(3, 0, (1,), 0),  # a slot that is not there
    Row(-1, 0, (1,), 0),
    Row(0, 0, tuple([1] * 300), 299),  # too long
    Row(0, 250, tuple([1] * 7), 0),  # beyond the slot's end
    Row(0, 0, (), 0),
    Row(0, 0, (1, 2), 3),  # logits of tokens that are not there
    Row(0, 0, (1, 2), -1),
    Row(1, 3, (10,), 0),  # a second row for a slot
]
INVALID_COPIES = [(3, 0, 1), (0, 3, 1), (-1, 0, 1), (0, 0, 1), (0, 1, 257)]

IDS = st.lists(st.integers(0, 119), min_size=1, max_size=20)
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), IDS), min_size=1, max_size=3), min_size=1, max_size=6
)


def saved(config: transformers.PretrainedConfig, directory: Path) -> torch.nn.Module:
    """Returns a random model of transformers and saves its files in a directory."""
    torch.manual_seed(0)
    # Eager attention has every feature; other implementations leave some out, partly without a warning.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(directory)
    return model


def family(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """Returns a random model of one of `FAMILIES`, and the directory of its files."""
    directory = tmp_path_factory.mktemp(name)
    return saved(FAMILIES[name], directory), directory


def expected(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Returns transformers' logits at every position."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def random_ids(seed: int, count: int) -> list[int]:
    """Returns varied ids, so that attention to a wrong position changes the logits."""
    choose = random.Random(seed)
    return [choose.randrange(1, 120) for _ in range(count)]


def check_that_every_mode_says_the_same(engine: str, *, target_options: tuple[str, ...]) -> None:
    """Runs the real pair as processes. `target_options` must make the target's logits independent of the width."""
    options = ("--engine", engine, "--threads", "1", "--kv-memory", "0.5")
    with (
        fleet(
            "gemma-3-270m",
            "smollm2-135m-instruct",
            target_options=(*options, *target_options),
            draft_options=options,
        ) as running,
        Client(running.bridge) as client,
    ):
        assert {model.engine for model in client.models()} == {engine}
        for temperature in (0.0, 1.0):
            alone, *results = (
                client.generate(
                    "The planets are",
                    max_tokens=48 if DEEP else 24,
                    temperature=temperature,
                    seed=2,
                    speculation=mode,
                )
                for mode in ("off", "lockstep", "opportunistic")
            )
            assert {result.token_ids for result in results} == {alone.token_ids}
            # Only lockstep is sure to have some: a target that does not wait may outrun the draft.
            assert results[0].finished.speculation.num_accepted_tokens > 0
            # A grammar is obeyed on every engine.
            forms = [
                client.generate(
                    "The planets are",
                    temperature=temperature,
                    seed=2,
                    speculation=mode,
                    choice=["Xq7 and y", "Xq8 or z"],
                )
                for mode in ("off", "lockstep")
            ]
            assert forms[0].text in ("Xq7 and y", "Xq8 or z")
            assert forms[0].token_ids == forms[1].token_ids


class EngineContract:
    """Needs a fixture `pair`: a model of transformers with 120 ids, and an engine for it with three slots."""

    tolerance: ClassVar[float] = 1e-4

    @settings(max_examples=examples(24))
    @given(steps=STEPS)
    def test_any_appends_keeps_and_batches_give_the_models_own_logits(self, pair: tuple, steps: list) -> None:
        model, engine = pair
        held: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for step in steps:
            rows = []
            for slot, fraction, ids in {one[0]: one for one in step}.values():
                keep = int(fraction * len(held[slot]))
                held[slot] = held[slot][:keep] + ids
                rows.append(Row(slot, keep, tuple(ids), len(ids) // 2))
            for row, logits in zip(rows, engine.forward(rows), strict=True):
                reference = expected(model, held[row.slot])[row.keep + row.logits_from :]
                assert logits.shape == reference.shape
                np.testing.assert_allclose(logits, reference, atol=self.tolerance)

    @settings(max_examples=examples(18))
    @given(ids=IDS, count=st.floats(0, 1), more=IDS, others=IDS)
    def test_a_copied_slot_goes_its_own_way(
        self, pair: tuple, ids: list[int], count: float, more: list[int], others: list[int]
    ) -> None:
        model, engine = pair
        shared = max(1, int(count * len(ids)))
        engine.forward([Row(1, 0, tuple(others), len(others)), Row(0, 0, tuple(ids), len(ids))])
        engine.copy(0, 1, shared)
        one, other = engine.forward([Row(0, len(ids), tuple(others), 0), Row(1, shared, tuple(more), 0)])
        np.testing.assert_allclose(one, expected(model, ids + others)[len(ids) :], atol=self.tolerance)
        np.testing.assert_allclose(other, expected(model, ids[:shared] + more)[shared:], atol=self.tolerance)

    def test_greedy_text_is_that_of_generate_over_a_long_text(self, pair: tuple) -> None:
        """The text is longer than the sliding windows."""
        model, engine = pair
        prompt = random_ids(0, 60)
        with torch.inference_mode():
            reference = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=40,
                min_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        ids, keep = list(prompt), 0
        while len(ids) < 100:
            logits = engine.forward([Row(0, keep, tuple(ids[keep:]), len(ids) - keep - 1)])[0]
            keep = len(ids)
            ids.append(int(logits[0].argmax()))
        assert ids == reference

    def test_rows_without_logits_are_only_cached(self, pair: tuple) -> None:
        model, engine = pair
        first, second = engine.forward([Row(0, 0, (1, 2, 3), 3), Row(1, 0, (4, 5), 1)])
        assert first.shape == (0, 120)
        assert second.shape == (1, 120)
        after = engine.forward([Row(0, 3, (6,), 0)])[0]
        np.testing.assert_allclose(after[0], expected(model, [1, 2, 3, 6])[-1], atol=self.tolerance)

    def test_a_slot_can_be_filled_to_its_end(self, pair: tuple) -> None:
        model, engine = pair
        ids = random_ids(1, engine.context_length)
        engine.forward([Row(2, 0, tuple(ids[:-3]), len(ids) - 3)])
        logits = engine.forward([Row(2, len(ids) - 3, tuple(ids[-3:]), 2)])[0]
        np.testing.assert_allclose(logits[0], expected(model, ids)[-1], atol=self.tolerance)

    def test_what_cannot_be_is_refused_and_does_no_harm(self, pair: tuple) -> None:
        model, engine = pair
        engine.forward([Row(1, 0, (7, 8, 9), 3)])
        for row in INVALID_ROWS:
            with pytest.raises(ValueError, match="row"):
                engine.forward([Row(1, 3, (10,), 0), row])
        with pytest.raises(ValueError, match="row"):
            engine.forward([])
        for source, target, count in INVALID_COPIES:
            with pytest.raises(ValueError, match="copy"):
                engine.copy(source, target, count)
        after = engine.forward([Row(1, 3, (10,), 0)])[0]
        np.testing.assert_allclose(after[0], expected(model, [7, 8, 9, 10])[-1], atol=self.tolerance)

    def test_it_says_who_it_is(self, pair: tuple) -> None:
        _, engine = pair
        assert engine.name
        assert engine.device
        assert engine.dtype
        assert (engine.vocabulary_size, engine.context_length, engine.slot_count) == (120, 256, 3)
        assert engine.cache_byte_count > 0
