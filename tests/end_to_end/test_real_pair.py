"""Compares SmolLM2 and Gemma 3, each drafting for the other in real processes, with transformers."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import services.cli
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.noise import token_keys
from bridge.sampling.sampler import History, Sampler, SamplingParameters
from draftbridge import Client, Generation
from draftbridge.v1 import bridge_pb2
from services.cli.processes import Fleet, fleet
from services.grammars.compiler import compile_grammar
from services.grammars.tokenizer import GrammarTokenizer
from services.store.files import ModelFiles, read_model_files
from services.store.resolve import resolve
from tests.support.depth import DEEP

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

PAIRS = ["gemma-3-270m<-smollm2-135m-instruct", "smollm2-135m-instruct<-gemma-3-270m"]
PROMPTS = json.loads((Path(services.cli.__file__).with_name("prompts.json")).read_text())
TOKENS = 48 if DEEP else 32
NEAR_TIE = 1e-3


@dataclass
class Setup:
    """A running pair, and transformers with the same target."""

    running: Fleet
    client: Client
    model: Any
    tokenizer: Any
    files: ModelFiles

    def prompt_ids(self, prompt: dict[str, Any]) -> list[int]:
        """Returns the prompt's ids as transformers tokenizes it."""
        if "prompt" in prompt:
            return list(self.tokenizer(prompt["prompt"]).input_ids)
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        turns = [f"{one['role'].capitalize()}: {one['content']}\n\n" for one in prompt["messages"]]
        return list(self.tokenizer("".join(turns) + "Assistant:").input_ids)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Returns transformers' greedy continuation."""
        if count == 0:
            return []
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=count, do_sample=False
            )
        return out[0, len(ids) :].tolist()

    def sampled(
        self, ids: list[int], generated: Sequence[int], options: dict[str, Any], grammar: Grammar | None = None
    ) -> tuple[list[int], bool]:
        """Returns the ids that the noise picks by transformers' logits of `generated` up to a near tie, and if it came.

        One forward is enough: its logits are right as long as the choices are those of `generated`. With a
        grammar, masks come straight from `llguidance`.
        """
        ends = list(self.files.special_ids.eos)
        if grammar:
            tokenizer = GrammarTokenizer(self.files.vocabulary)
            matcher = compile_grammar(tokenizer.library, grammar, forcing=tokenizer.forcing)
        words = self.files.vocabulary
        known = {field.name for field in fields(SamplingParameters)}
        parameters = SamplingParameters(**{key: value for key, value in options.items() if key in known})
        keys = token_keys(words, self.files.special_ids.eos)
        missing = np.array([id_ for id_, data in enumerate(words.tokens) if data is None], int)
        sampler = Sampler(parameters, options["seed"], keys, missing, tolerance=NEAR_TIE)
        chosen: list[int] = []
        history = History(ids)
        with torch.inference_mode():
            rows = self.model(torch.tensor([[*ids, *generated[:-1]]])).logits[0, len(ids) - 1 :].numpy()
        for logits, id_ in zip(rows, generated, strict=True):
            mask = None
            if grammar:
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed = np.unpackbits(bits, bitorder="little").astype(bool)
                mask = allowed[: words.size].copy()
                mask[ends] = allowed[tokenizer.end]
            choice = sampler.choose(logits, len(words.spell(chosen)), 0, history, mask)
            if choice.near_tie:
                return chosen, True
            chosen.append(choice.token_id)
            history.extend((choice.token_id,))
            if choice.token_id != id_:
                break
            assert not grammar or id_ in ends or matcher.consume_token(id_)
        return chosen, False

    def tie(self, ids: list[int], one: int, other: int) -> float:
        """Returns the difference of two ids' logits after `ids`; infinite if they are not the best two."""
        with torch.inference_mode():
            best = self.model(torch.tensor([ids])).logits[0, -1].topk(2)
        if {one, other} != set(best.indices.tolist()):
            return float("inf")
        return float(best.values[0] - best.values[1])


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    target, draft = request.param.split("<-")
    # Each gets half of the cores: threads that wait for one another by spinning do not share a core well.
    options = ("--dtype", "float32", "--threads", str(max(1, (os.cpu_count() or 1) // 2)))
    directory = resolve(target)
    resolve(draft)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with (
        fleet(target, draft, target_options=options, draft_options=options) as running,
        Client(running.bridge) as client,
    ):
        yield Setup(running, client, model, tokenizer, read_model_files(directory))


def ask(setup: Setup, prompt: dict[str, Any], **options: Any) -> Generation:
    options = {"max_tokens": TOKENS} | options
    return setup.client.generate(prompt.get("prompt"), messages=prompt.get("messages"), **options)


def every_second(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns each pair with half of the values, so that each value has a pair; in a deep run, with all of them."""
    return [(pair, value) for at, pair in enumerate(PAIRS) for value in (values if DEEP else values[at::2])]


# Each pair has a prompt of each category, as prompts of a category stand together; each prompt has a mode.
CASES = every_second([(index, ("lockstep", "opportunistic")[index // 2 % 2]) for index in range(len(PROMPTS))])


@pytest.mark.parametrize(
    ("setup", "index", "mode"),
    [(pair, *case) for pair, case in CASES],
    indirect=["setup"],
    ids=[f"{pair}-{PROMPTS[index]['category']}-{index}-{mode}" for pair, (index, mode) in CASES],
)
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
        agreed = parted + 1  # and continue from there
    assert result.text == setup.tokenizer.decode(got, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    statistics = result.finished.speculation
    assert statistics.target_pass_count + statistics.num_accepted_tokens == len(got)
    assert statistics.note == ""


def test_the_draft_helps(setup: Setup) -> None:
    # The number is given, because lockstep would otherwise choose one that suits this machine.
    options = {"speculation": "lockstep", "num_assistant_tokens": 4}
    results = [ask(setup, prompt, **options).finished for prompt in PROMPTS[2:8:2]]
    accepted = sum(result.speculation.num_accepted_tokens for result in results)
    passes = sum(result.speculation.target_pass_count for result in results)
    print(f"{accepted} tokens accepted in {passes} passes")
    assert accepted > 0.5 * passes


SAMPLING = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.95, "frequency_penalty": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize(
    ("setup", "options"),
    every_second(SAMPLING),
    indirect=["setup"],
    ids=[f"{pair}-T={options['temperature']}" for pair, options in every_second(SAMPLING)],
)
def test_a_seed_gives_the_same_text_in_every_mode_and_it_is_what_the_models_own_logits_give(
    setup: Setup, options: dict[str, Any]
) -> None:
    prompt = PROMPTS[6]
    options = {"seed": 11, "max_tokens": 24} | options
    alone = ask(setup, prompt, speculation="off", **options)
    for mode, length in (("lockstep", 2), ("lockstep", 9), ("opportunistic", None)):
        result = ask(setup, prompt, speculation=mode, num_assistant_tokens=length, **options)
        assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
    expected, near_tie = setup.sampled(setup.prompt_ids(prompt), alone.token_ids, options)
    assert expected == list(alone.token_ids)[: len(expected)]
    assert near_tie or len(expected) == len(alone.token_ids)


SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["naïve", "advanced"]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 2},
    },
    "required": ["title", "kind", "steps"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_is_the_same_in_every_mode_and_what_the_models_own_logits_give(setup: Setup, temperature: float) -> None:
    prompt = PROMPTS[6]
    options = {"seed": 5, "max_tokens": 160, "temperature": temperature}
    demanded = options | {"json_schema": SCHEMA}
    alone = ask(setup, prompt, speculation="off", **demanded)
    jsonschema.validate(json.loads(alone.text), SCHEMA)
    for mode in ("lockstep", "opportunistic", "auto"):
        result = ask(setup, prompt, speculation=mode, **demanded)
        assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
    counted = {one.name: one for one in result.finished.speculation.sources}
    assert counted["grammar"].num_accepted_tokens > 0
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    expected, near_tie = setup.sampled(setup.prompt_ids(prompt), alone.token_ids, options, grammar)
    assert expected == list(alone.token_ids)[: len(expected)]
    assert near_tie or len(expected) == len(alone.token_ids)


# The last test, because it leaves the pair without its draft.
def test_a_draft_killed_half_way_changes_nothing(setup: Setup) -> None:
    prompt = PROMPTS[3]
    sampling = {"temperature": 1.0, "seed": 3}
    expected = ask(setup, prompt, speculation="off", **sampling)
    events = []
    for event in setup.client.stream(prompt["prompt"], max_tokens=TOKENS, speculation="lockstep", **sampling):
        events.append(event)
        if sum(isinstance(one, bridge_pb2.GenerateDelta) for one in events) == 5:
            os.kill(setup.running.processes["draft"].pid, signal.SIGKILL)
    result = Generation.of(events)
    assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
    assert "went on without it" in result.finished.speculation.note
    # And without any draft from the start:
    later = ask(setup, prompt, speculation="lockstep", **sampling)
    assert (later.text, later.token_ids) == (expected.text, expected.token_ids)
