"""Tests the adapter for transformers with a real model and a bridge whose candidates the test chooses."""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scipy.stats import chisquare

from bridge.guest import _PROMPT_FACTOR
from draftbridge.candidates import DEFAULT_DEADLINE_SECONDS, SequenceStep
from draftbridge.guests.transformers import Assistance, _Generator
from tests.support.guests import ToldClient

# Two ids, so that candidates are right now and then.
PAIR = (14, 15)
NARROW = {"sequence_bias": [[[id_], 100.0] for id_ in PAIR]}
# The argument of `generate` for a cache, and its name before transformers 5.24.
_NEW = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)
_CACHE = "cache" if _NEW else "past_key_values"
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"


@pytest.fixture(scope="module")
def loaded(tiny_models: tuple[Path, Path]) -> tuple[Any, Any]:
    directory = tiny_models[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def generated(loaded: tuple[Any, Any], **options: Any) -> list[int]:
    model, tokenizer = loaded
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids: list[int] = model.generate(**inputs, **{"max_new_tokens": 40, "do_sample": False} | options)[0].tolist()
    return ids


def assisted(model: Any, client: Any, deadline: float = 0.25) -> Assistance:
    return Assistance(model, client, deadline)


def test_right_candidates_save_forwards(loaded: tuple[Any, Any]) -> None:
    plain = generated(loaded, **NARROW)
    forwards: list[int] = []
    hook = loaded[0].register_forward_hook(lambda *_: forwards.append(1))
    with assisted(loaded[0], client := ToldClient(plain)):
        assert generated(loaded, **NARROW) == plain
    hook.remove()
    assert len(forwards) == 1 + 5  # the prompt, and 39 tokens of which each forward has 8
    assert client.ended == [1]
    assert client.engine_seconds[0] == 0 and all(client.engine_seconds[1:]), "times are those of a call's own forwards"


def test_a_wrapper_is_assisted_as_its_model_is(loaded: tuple[Any, Any]) -> None:
    """As PEFT's: it has its model's methods, and the model calls its own."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.inner = model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def generate(self, *given: Any, **options: Any) -> Any:
            return self.inner.generate(*given, **options)

    model, tokenizer = loaded
    plain, wrapper = generated(loaded), Wrapper(model)
    with assisted(wrapper, client := ToldClient(plain)):
        assert generated((wrapper, tokenizer)) == plain
    assert client.proposed_count > 20
    assert "_get_candidate_generator" not in vars(model) and "generate" not in vars(wrapper)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_closed_assistance_leaves_the_generate_of_others(loaded: tuple[Any, Any], in_order: bool) -> None:
    """Another library has put its own `generate` on the model before, and perhaps a second assistance comes after."""
    model = loaded[0]
    plain, theirs = generated(loaded), lambda *args, **options: type(model).generate(model, *args, **options)
    model.generate = theirs
    first, second = (assisted(model, ToldClient(plain)) for _ in range(2))
    assert generated(loaded) == plain and second.client.proposed_count > 20, "the later one is asked"
    for one in (second, first) if in_order else (first, second):
        one.close()
    before = first.client.steps[:], second.client.steps[:]
    assert generated(loaded) == plain and before == (first.client.steps, second.client.steps)
    assert not in_order or model.generate is theirs
    del model.generate
    vars(model).pop("_get_candidate_generator", None)


def test_no_candidate_follows_the_end_of_a_text(loaded: tuple[Any, Any]) -> None:
    truth = generated(loaded)
    end = truth[-20]
    plain = generated(loaded, eos_token_id=end)
    widths: list[int] = []
    hook = loaded[0].register_forward_hook(lambda *call: widths.append(call[-1].logits.shape[1]))
    with assisted(loaded[0], ToldClient(truth, width=30)):
        assert generated(loaded, eos_token_id=end) == plain
    hook.remove()
    assert plain[-1] == end and len(plain) < len(truth)
    assert sum(widths[1:]) == len(plain) - (len(truth) - 40), "all that was generated, and nothing after its end"


def test_sampling_is_lossless(loaded: tuple[Any, Any]) -> None:
    """No logits are returned, so each token is drawn from the model's own distribution, with or without candidates."""
    model, tokenizer = loaded
    count, runs, temperature = 5, 500, 3.0  # at which both ids are likely everywhere
    options = {"do_sample": True, "top_k": 0, "temperature": temperature, "max_new_tokens": count, **NARROW}
    torch.manual_seed(1)
    with assisted(model, client := ToldClient(guess=(14, 14, 15, 14))):
        drawn = Counter(tuple(generated(loaded, **options)[-count:]) for _ in range(runs))
    assert client.proposed_count > 2 * runs
    prompt = tokenizer(PROMPT)["input_ids"]
    texts = list(product(PAIR, repeat=count))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -count - 1 : -1]
    chances = torch.softmax(logits[:, :, PAIR].double() / temperature, -1)
    right = torch.tensor([[PAIR.index(id_) for id_ in text] for text in texts])
    expected = runs * chances.gather(2, right[:, :, None])[:, :, 0].prod(1)
    frequent = [place for place, value in enumerate(expected.tolist()) if value >= 5]
    assert len(frequent) > 15 and drawn.total() == sum(drawn[text] for text in texts)
    found = [drawn[texts[place]] for place in frequent]
    rest, expected_rest = runs - sum(found), runs - float(expected[frequent].sum())
    result = chisquare([*found, rest], [*expected[frequent].tolist(), expected_rest])
    assert result.pvalue > 0.001, (found, expected[frequent])


def _stop(word: int) -> Any:
    """Returns a criterion that ends a text after an id."""
    return transformers.StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([bool(ids[0, -1] == word)])])


class _Alternating(transformers.LogitsProcessor):
    """Allows one of two ids in turn, as a grammar that advances with each call does."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        scores[:, PAIR[self._calls % 2]] += 1000
        return scores


def _cache(model: Any, ids: list[int]) -> Any:
    """Returns a cache that holds the beginning of the prompt, as after the first message of a chat."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=True).past_key_values


def _options(name: str, loaded: tuple[Any, Any]) -> dict[str, Any]:
    model, tokenizer = loaded
    plain = generated(loaded)
    middle = plain[-20]
    return {
        "stop strings": {"stop_strings": tokenizer.decode([middle]), "tokenizer": tokenizer},
        "stop strings of a configuration": {
            "generation_config": transformers.GenerationConfig(
                max_new_tokens=40, do_sample=False, stop_strings=tokenizer.decode([middle])
            ),
            "tokenizer": tokenizer,
        },
        "stopping criteria": {"stopping_criteria": _stop(middle)},
        "processors": {"logits_processor": transformers.LogitsProcessorList([_Alternating()])},
        "guidance": {"guidance_scale": 1.5},
        "watermark": {"watermarking_config": transformers.WatermarkingConfig()},
        "static cache": {_CACHE: transformers.StaticCache(model.config, max_cache_len=200)},
        "a cache with a text": {_CACHE: _cache(model, plain[:5])},
        "static cache by name": {"cache_implementation": "static"},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "beams": {"num_beams": 2},
        "beams by default": {},
        "no cache": {"use_cache": False},
        "several sequences": {"num_return_sequences": 2, "do_sample": True},
        "attentions": {"output_attentions": True},
        "tensor parallel": {},
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "stop strings", "stop strings of a configuration", "stopping criteria", "processors", "guidance", "watermark",
        "static cache", "a cache with a text", "static cache by name", "lookup", "beams", "beams by default",
        "no cache", "several sequences", "attentions", "tensor parallel",
    ],
)  # fmt: skip
def test_what_cannot_be_assisted_runs_as_before(
    loaded: tuple[Any, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = loaded
    if name == "tensor parallel":
        monkeypatch.setattr(model, "_tp_size", 2)
    if name == "beams by default":
        monkeypatch.setattr(model.generation_config, "num_beams", 2)
    truth = generated(loaded)
    torch.manual_seed(0)
    plain = generated(loaded, **_options(name, loaded))
    with assisted(model, client := ToldClient(truth)):
        options = _options(name, loaded)
        client.steps.clear()
        torch.manual_seed(0)
        assert generated(loaded, **options) == plain
        assert not client.steps


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": None},
        {"guidance_scale": 1.0, "num_beams": 1, "stopping_criteria": None},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
)
def test_harmless_options_are_assisted(loaded: tuple[Any, Any], options: dict[str, Any]) -> None:
    plain = generated(loaded, **options)
    with assisted(loaded[0], client := ToldClient(plain)):
        assert generated(loaded, **options) == plain
    assert client.proposed_count > 20


def test_a_hybrid_cache_by_default_is_a_dynamic_one(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations of Gemma name it; transformers ignores it."""
    monkeypatch.setattr(loaded[0].generation_config, "cache_implementation", "hybrid")
    plain = generated(loaded)
    with assisted(loaded[0], client := ToldClient(plain)):
        assert generated(loaded) == plain
    assert client.proposed_count > 20


def test_calls_in_several_threads_do_not_wait_for_a_draft(loaded: tuple[Any, Any]) -> None:
    plain = generated(loaded)
    client, started = ToldClient(plain), threading.Barrier(2)

    def run() -> None:
        assert generated(loaded, prefix_allowed_tokens_fn=together) == plain

    def together(_: int, ids: torch.Tensor) -> list[int]:
        if len(ids) == len(plain) - 40:
            started.wait(120)
        return list(range(loaded[0].config.vocab_size))

    with assisted(loaded[0], client):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert sorted(client.ended) == [1, 2]
    by_call = {id_: [step for step in client.steps if step.sequence_id == id_] for id_ in (1, 2)}
    assert all(len(steps) == 6 for steps in by_call.values())
    assert DEFAULT_DEADLINE_SECONDS in client.deadlines


class HeldClient(ToldClient):
    """Keeps the first call to itself, as a bridge that does not answer for a long time."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text)
        self.entered, self.released = threading.Event(), threading.Event()

    def step(self, *given: Any, **options: Any) -> Any:
        if not self.entered.is_set():
            self.entered.set()
            self.released.wait(30)
        return super().step(*given, **options)


def test_a_call_does_not_wait_until_another_has_its_answer(loaded: tuple[Any, Any]) -> None:
    plain = generated(loaded)
    with assisted(loaded[0], client := HeldClient(plain)):
        waiting = threading.Thread(target=lambda: generated(loaded))
        waiting.start()
        assert client.entered.wait(60)
        assert generated(loaded) == plain
        assert not client.steps, "the other call has got its answer before"
        client.released.set()
        waiting.join(120)
    assert sorted(client.ended) == [1, 2], "the end of a text is reported later"


def test_a_forward_that_could_not_be_reported_is_part_of_the_next_report() -> None:
    reports = list[tuple[int, int | None, int]]()
    missed = 100
    answers = iter([(), (7, 8), *[None] * missed, ()])

    class Busy:
        """In place of `Assistance`, whose client another call uses now and then."""

        def _step(self, step: SequenceStep, engine_seconds: float, forward_token_count: int) -> Sequence[int] | None:
            reports.append((len(step.token_ids), step.verified_count, forward_token_count))
            return next(answers)

    generator = _Generator(Busy(), 1, 50, ())  # type: ignore[arg-type]
    for count in (4, 5, *range(8, 9 + missed)):
        generator.get_candidates(torch.arange(count)[None])
    assert [report[:2] for report in reports] == [(4, 0), (5, 0), *((count, 2) for count in range(8, 9 + missed))]
    run = [count for *_, count in reports]
    assert run[:3] == [0, 4, 3]
    # The bridge learns no costs from these: their time is that of several forwards.
    assert min(run[3:]) > _PROMPT_FACTOR * (1 + 2) and max(run[3:]) < 10


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generated(loaded)
    with assisted(loaded[0], client := ToldClient(plain)) as assistance:
        assistance._running.add(7)
        assistance._lock.acquire()  # in another thread of the parent
        monkeypatch.setattr(os, "getpid", lambda: -1)  # as in the child
        child = threading.Thread(target=lambda: generated(loaded), daemon=True)
        child.start()
        child.join(60)
        assert not child.is_alive() and client.ended == [1]
        client.deadlines.clear()
        assert generated(loaded) == plain and set(client.deadlines) == {0.25}, "no call runs beside it"
