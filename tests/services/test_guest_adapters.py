"""The adapters for transformers and llama-cpp-python, with a real transformers model and a stand-in for llama.cpp."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import draftbridge
from draftbridge.candidates import Candidates, SequenceStep
from draftbridge.guests.client import Client
from draftbridge.guests.llama_cpp import BridgeDraftModel
from tests.support import gguf, tiny
from tests.support.guests import Bridge, ToldClient, running

# A call of the tiny model may end before the bridge has read its prompt.
ATTEMPTS = 20
# Leaves two ids to choose from, so that the text repeats itself.
NARROW = {"sequence_bias": [[[14], 100.0], [[15], 100.0]]}
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"


@pytest.fixture(scope="module")
def loaded(tiny_models: tuple[Path, Path]) -> tuple[Any, Any]:
    directory = tiny_models[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    with running() as found:
        yield found


def generated(model: Any, tokenizer: Any, prompt: str = PROMPT, **options: Any) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 60, "do_sample": False} | options
    ids: list[int] = model.generate(**inputs, **options)[0].tolist()
    return ids


@contextmanager
def assisted(model: Any, tokenizer: Any, address: str, **options: Any) -> Iterator[Client]:
    """Assists as if each forward took 20 ms, whatever its width, so that candidates are always worth a forward."""
    with draftbridge.assist(model, tokenizer, address, **options) as assistance:
        client, step = assistance.client, assistance.client.step
        client.step = lambda *args, **more: step(*args, **more | {"engine_seconds": 0.02})  # type: ignore[method-assign]
        yield client


@pytest.mark.parametrize("local", [False, True])
def test_greedy_text_is_the_model_s_own(loaded: tuple[Any, Any], bridge: Bridge, local: bool) -> None:
    model, tokenizer = loaded
    cases = [(PROMPT, NARROW), ("She sells sea", {}), ("Grüße aus Köln: naïve café", {})]
    forwards: list[int] = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    plain = [generated(model, tokenizer, prompt, **options) for prompt, options in cases]
    plain_forward_count = len(forwards)
    with assisted(model, tokenizer, "local" if local else bridge.address):
        for _ in range(ATTEMPTS):
            forwards.clear()
            assert [generated(model, tokenizer, prompt, **options) for prompt, options in cases] == plain
            if len(forwards) < plain_forward_count:
                break
    hook.remove()
    assert len(forwards) < plain_forward_count, "no candidates were accepted"
    assert "generate" not in model.__dict__ and "_get_candidate_generator" not in model.__dict__


def test_a_draft_of_another_tokenizer_is_verified(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    plain = generated(model, tokenizer)
    words = tiny.vocabulary("sentencepiece")
    text = words.spell(plain[1:])
    with (
        running(draft_text=text) as found,
        assisted(model, tokenizer, found.address, sources=["draft"]) as client,
    ):
        for _ in range(ATTEMPTS):
            assert generated(model, tokenizer) == plain
            if client.counts.candidate_count:
                break
        assert client.counts.candidate_count > 0


def test_the_model_is_described(loaded: tuple[Any, Any], bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    monkeypatch.setattr(tokenizer, "chat_template", {"default": "the default", "tool_use": "another"})
    monkeypatch.setattr(model.generation_config, "eos_token_id", [2, 7])
    with draftbridge.assist(model, tokenizer, bridge.address) as assistance:
        described = assistance.client._model  # type: ignore[attr-defined]
    assert described.chat_template == "the default"
    assert list(described.special_ids.eos) == [2, 7] and described.special_ids.bos == tokenizer.bos_token_id


def test_a_batch_runs_as_before(loaded: tuple[Any, Any], bridge: Bridge) -> None:
    model, tokenizer = loaded
    batch = tokenizer([PROMPT, PROMPT], return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**batch, max_new_tokens=5, do_sample=False)
    with draftbridge.assist(model, tokenizer, bridge.address):
        assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), plain)


def test_without_a_bridge_the_text_is_the_same(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    plain = generated(model, tokenizer)
    with draftbridge.assist(model, tokenizer, "127.0.0.1:1", connect_timeout=0.1):
        assert generated(model, tokenizer) == plain


class LlamaLoop:
    """Verifies the candidates of a draft model as `Llama.generate` does, with a text that is known."""

    def __init__(self, draft: BridgeDraftModel, truth: list[int], prompt_count: int) -> None:
        self.passes = 0
        ids, count = np.array(truth, dtype=np.intc), prompt_count + 1
        while count < len(truth):
            self.passes += 1
            candidates = draft(ids[:count]).astype(int)
            right = 0
            while right < len(candidates) and count + right < len(truth) and candidates[right] == truth[count + right]:
                right += 1
            count += right + 1


def test_llama_cpp_python(bridge: Bridge) -> None:
    words = tiny.vocabulary("sentencepiece")
    truth = list(words.pieces(("The quick brown fox jumps over the lazy dog. She sells sea shells! " * 5).encode()).ids)
    draft = BridgeDraftModel(bridge.address, tiny.tokenizer_json("sentencepiece"), context_length=4096)
    first = LlamaLoop(draft, truth, 60)
    again = LlamaLoop(draft, truth[:-20], 40)
    other = LlamaLoop(draft, truth[30:], 30)
    draft.close()
    for loop, plain in ((first, len(truth) - 61), (again, len(truth) - 61), (other, len(truth) - 61)):
        assert loop.passes < 0.7 * plain
    assert len(draft(np.array([5, 6], dtype=np.intc))) == 0, "closed"


@pytest.mark.parametrize("content", [b"{}", b"", b"[]", b'{"model": {"vocab": {}}}', b"\xff"])
def test_a_wrong_tokenizer_is_refused_with_its_path_and_the_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=rf"^{path} cannot be read \(No such file or directory\): give the path"):
        BridgeDraftModel("local", path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path} is not a tokenizer\.json .*: give the path of the model's own"):
        BridgeDraftModel("local", str(path))
    with pytest.raises(ValueError, match=r"^the content is not a tokenizer\.json"):
        BridgeDraftModel("local", content)


def test_the_next_message_of_a_chat_begins_a_sequence(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the draft reads it in its own template, and the time until it came is not that of a forward."""
    draft = BridgeDraftModel(bridge.address, tiny.tokenizer_json("sentencepiece"), context_length=4096)
    steps: list[tuple[SequenceStep, list[int]]] = []
    answers = iter([(8, 9), (), (), ()])

    def step(sequences: list[SequenceStep], *, ended: list[int], deadline: float) -> dict[int, Candidates]:
        steps.append((sequences[0], ended))
        found = next(answers)
        return {sequences[0].sequence_id: Candidates(found, ("suffix",) * len(found))}

    monkeypatch.setattr(draft.client, "step", step)
    ids = np.arange(5, 40, dtype=np.intc)
    for count in (3, 6, 7, 12):  # three ids by right candidates, one without, then a message and the first id after it
        draft(ids[:count])
    assert [(one.sequence_id, one.generated_token_count, ended) for one, ended in steps] == [
        (1, 1, []),
        (1, 4, []),
        (1, 5, []),
        (2, 1, [1]),
    ]
    draft.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_llama_cpp_python_itself(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Uses llama-cpp-python's own loop with right and wrong candidates. `make test-engines` installs it."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="the llamacpp extra is not installed: make test-engines")
    model, tokenizer = loaded
    gguf.write(model, tmp_path / "model.gguf")
    prompt = tokenizer(PROMPT)["input_ids"]

    def generated_by(client: ToldClient | None) -> list[int]:
        draft = BridgeDraftModel("127.0.0.1:1", tiny.tokenizer_json("sentencepiece"), connect_timeout=0)
        draft.close()
        draft.client = client  # type: ignore[assignment]
        llama = llama_cpp.Llama(
            str(tmp_path / "model.gguf"),
            n_ctx=256,
            n_threads=1,
            draft_model=draft if client else None,
            logits_all=True,
            verbose=False,
        )
        text = [int(id_) for id_, _ in zip(llama.generate(prompt, temp=0.0, top_k=1), range(80), strict=False)]
        llama.close()
        return text

    plain = generated_by(None)
    right, wrong = ToldClient([*prompt, *plain]), ToldClient(guess=plain[:3])
    assert generated_by(right) == generated_by(wrong) == plain
    assert len(right.steps) == 10, "each forward accepts 7 candidates"
    assert wrong.proposed_count > 100
    assert {one.sequence_id for one in (*right.steps, *wrong.steps)} == {1}
