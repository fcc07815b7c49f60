"""SmolLM2 and Gemma 3, each drafting for the other, in real processes, against transformers."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftbridge import Client, Generation
from draftbridge.v1 import bridge_pb2
from services.model.store import resolve
from services.processes import Fleet, fleet

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

PAIRS = [("gemma-3-270m", "smollm2-135m-instruct"), ("smollm2-135m-instruct", "gemma-3-270m")]
PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text())
TOKENS = 64
NEAR_TIE = 1e-3


@dataclass
class Setup:
    """A running pair, and transformers with the same target."""

    running: Fleet
    client: Client
    model: Any
    tokenizer: Any

    def prompt_ids(self, prompt: dict[str, Any]) -> list[int]:
        """As transformers tokenizes it."""
        if "prompt" in prompt:
            return list(self.tokenizer(prompt["prompt"]).input_ids)
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        turns = [f"{one['role'].capitalize()}: {one['content']}\n\n" for one in prompt["messages"]]
        return list(self.tokenizer("".join(turns) + "Assistant:").input_ids)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Transformers' own continuation."""
        if count == 0:
            return []
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=count, do_sample=False
            )
        return out[0, len(ids) :].tolist()

    def tie(self, ids: list[int], one: int, other: int) -> float:
        """How far apart two ids' logits are behind `ids`; infinite if they are not the best two."""
        with torch.inference_mode():
            best = self.model(torch.tensor([ids])).logits[0, -1].topk(2)
        if {one, other} != set(best.indices.tolist()):
            return float("inf")
        return float(best.values[0] - best.values[1])


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair[0]}<-{pair[1]}")
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    target, draft = request.param
    options = ("--dtype", "float32", "--threads", str(os.cpu_count() or 1))
    directory = resolve(target)
    resolve(draft)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with (
        fleet(target, draft, target_options=options, draft_options=options) as running,
        Client(running.bridge) as client,
    ):
        yield Setup(running, client, model, tokenizer)


def ask(setup: Setup, prompt: dict[str, Any], **options: Any) -> Generation:
    return setup.client.generate(prompt.get("prompt"), messages=prompt.get("messages"), max_tokens=TOKENS, **options)


# Every third prompt is enough for the second mode.
CASES = [
    (index, mode) for mode, step in (("lockstep", 1), ("opportunistic", 3)) for index in range(0, len(PROMPTS), step)
]


@pytest.mark.parametrize(("index", "mode"), CASES, ids=[f"{PROMPTS[i]['category']}-{i}-{mode}" for i, mode in CASES])
def test_greedy_text_is_that_of_transformers(setup: Setup, index: int, mode: str) -> None:
    prompt = PROMPTS[index]
    prompt_ids = setup.prompt_ids(prompt)
    result = ask(setup, prompt, speculation=mode)
    got = list(result.token_ids)
    assert result.started.prompt_token_count == len(prompt_ids)
    agreed = 0
    while True:
        expected = got[:agreed] + setup.greedy(prompt_ids + got[:agreed], TOKENS - agreed)
        if got == expected:
            break
        parted = next(i for i in range(TOKENS) if got[i : i + 1] != expected[i : i + 1])
        gap = setup.tie(prompt_ids + got[:parted], got[parted], expected[parted])
        print(f"parted at token {parted}: the two best logits were {gap:.1e} apart")
        assert gap < NEAR_TIE
        agreed = parted + 1  # and go on from there
    assert result.text == setup.tokenizer.decode(got, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    statistics = result.finished.speculation
    assert statistics.target_pass_count + statistics.num_accepted_tokens == len(got)
    assert statistics.note == ""


def test_the_draft_helps(setup: Setup) -> None:
    results = [ask(setup, prompt, speculation="lockstep").finished for prompt in PROMPTS[2:8:2]]
    accepted = sum(result.speculation.num_accepted_tokens for result in results)
    passes = sum(result.speculation.target_pass_count for result in results)
    print(f"{accepted} tokens accepted in {passes} passes")
    assert accepted > 0.5 * passes


@pytest.mark.parametrize("mode", ["off", "lockstep", "opportunistic"])
def test_a_seed_gives_the_same_text_in_every_mode(setup: Setup, mode: str) -> None:
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    expected = ask(setup, PROMPTS[6], speculation="off", **options)
    assert ask(setup, PROMPTS[6], speculation=mode, **options).text == expected.text


# The last test, because it leaves the pair without its draft.
def test_a_draft_killed_half_way_changes_nothing(setup: Setup) -> None:
    prompt = PROMPTS[3]
    expected = ask(setup, prompt, speculation="off")
    events = []
    for event in setup.client.stream(prompt["prompt"], max_tokens=TOKENS, speculation="lockstep"):
        events.append(event)
        if sum(isinstance(one, bridge_pb2.GenerateDelta) for one in events) == 5:
            os.kill(setup.running.processes["draft"].pid, signal.SIGKILL)
    result = Generation.of(events)
    assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
    assert "went on alone" in result.finished.speculation.note
    # And without any draft from the start:
    later = ask(setup, prompt, speculation="lockstep")
    assert (later.text, later.token_ids) == (expected.text, expected.token_ids)
