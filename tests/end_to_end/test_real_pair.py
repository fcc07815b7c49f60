"""SmolLM2 drafts for Gemma 3, and in a deep run Gemma 3 for SmolLM2, in real processes, against transformers."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

import services.cli
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.noise import token_keys
from bridge.sampling.sampler import History, Sampler, SamplingParameters
from draftbridge import Client, Generation
from draftbridge.v1 import bridge_pb2
from services.cli.processes import launched, serve
from services.grammars.byte_matcher import byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.token_matcher import TokenMatcher
from services.grammars.tokenizer import GrammarTokenizer
from services.store.files import ModelFiles, read_model_files
from services.store.resolve import resolve
from tests.support.depth import DEEP

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

MODELS = ("gemma-3-270m", "smollm2-135m-instruct")
PAIRS = ["gemma-3-270m<-smollm2-135m-instruct", *(["smollm2-135m-instruct<-gemma-3-270m"] if DEEP else [])]
PROMPTS = json.loads((Path(services.cli.__file__).with_name("prompts.json")).read_text())
TOKENS = 48 if DEEP else 16
NEAR_TIE = 1e-3


@dataclass
class Setup:
    """A running pair, and transformers with the same target."""

    target: str
    draft: str
    draft_process: "subprocess.Popen[str]"
    client: Client
    model: Any
    tokenizer: Any
    files: ModelFiles

    def prompt_ids(self, prompt: dict[str, Any]) -> list[int]:
        """As transformers tokenizes it."""
        if "prompt" in prompt:
            return list(self.tokenizer(prompt["prompt"]).input_ids)
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        turns = [f"{one['role'].capitalize()}: {one['content']}\n\n" for one in prompt["messages"]]
        return list(self.tokenizer("".join(turns) + "Assistant:").input_ids)

    def logits(self, ids: list[int], generated: Sequence[int]) -> NDArray[np.float32]:
        """Returns transformers' logits for each of the generated ids: one forward gives those of all positions."""
        with torch.inference_mode():
            rows = self.model(torch.tensor([[*ids, *generated[:-1]]])).logits[0, len(ids) - 1 :]
        return cast("NDArray[np.float32]", rows.numpy())

    def sampled(
        self, ids: list[int], generated: Sequence[int], options: dict[str, Any], grammar: Grammar | None = None
    ) -> tuple[list[int], bool]:
        """Returns the ids that the noise chooses from transformers' logits after `ids`, and whether a near tie came.

        They end where they differ from `generated`, or before a near tie, because transformers' logits are those after
        the generated ids. With a grammar, a matcher that only moves forward gives the masks.
        """
        ends = list(self.files.special_ids.eos)
        if grammar:
            tokenizer = GrammarTokenizer(self.files.vocabulary)
            matchers = compile_grammar(tokenizer.library, grammar), compile_grammar(byte_tokenizer(), grammar)
            matcher = TokenMatcher(*matchers, grammar, tokenizer, frozenset(ends), self.target)
        words = self.files.vocabulary
        known = {field.name for field in fields(SamplingParameters)}
        parameters = SamplingParameters(**{key: value for key, value in options.items() if key in known})
        keys = token_keys(words, self.files.special_ids.eos)
        missing = np.array([id_ for id_, data in enumerate(words.tokens) if data is None], int)
        sampler = Sampler(parameters, options["seed"], keys, missing, tolerance=NEAR_TIE)
        chosen: list[int] = []
        history = History(ids)
        for logits, id_ in zip(self.logits(ids, generated), generated, strict=True):
            mask = None
            if grammar:
                mask = matcher.allowed()
            choice = sampler.choose(logits, len(words.spell(chosen)), 0, history, mask)
            if choice.near_tie:
                return chosen, True
            chosen.append(choice.token_id)
            history.extend((choice.token_id,))
            if choice.token_id != id_:
                break
            if grammar and id_ not in ends:
                matcher.advance([id_])
        return chosen, False


@pytest.fixture(scope="module")
def setups() -> Iterator[dict[str, Setup]]:
    """All pairs with one bridge. With both of them, each model is a target and a draft."""
    # Half of the cores each: threads that wait for one another by spinning do not share a core well.
    options = ("--dtype", "float32", "--threads", str(max(1, (os.cpu_count() or 1) // 2)))
    directories = {name: resolve(name) for name in MODELS}
    roles = dict.fromkeys(MODELS, "both") if len(PAIRS) > 1 else dict(zip(MODELS, ("target", "draft"), strict=True))
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = pool.map(lambda name: stack.enter_context(serve(name, *options, "--role", roles[name])), MODELS)
        models = {
            name: AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            for name, directory in directories.items()
            if roles[name] != "draft"
        }
        servers = dict(zip(MODELS, starting, strict=True))
        known = [
            word
            for name, (address, _) in servers.items()
            for role in ("target", "draft")
            if roles[name] in (role, "both")
            for word in (f"--{role}", address)
        ]
        bridge = launched("bridge", "bridge", *known, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        client = stack.enter_context(Client(stack.enter_context(bridge)[0]))
        found = {}
        for pair in PAIRS:
            target, draft = pair.split("<-")
            directory, process = directories[target], servers[draft][1]
            tokenizer = AutoTokenizer.from_pretrained(directory)
            found[pair] = Setup(target, draft, process, client, models[target], tokenizer, read_model_files(directory))
        yield found


@pytest.fixture(params=PAIRS, ids=str)
def setup(request: pytest.FixtureRequest, setups: dict[str, Setup]) -> Setup:
    return setups[request.param]


def ask(setup: Setup, prompt: dict[str, Any], **options: Any) -> Generation:
    options = {"max_tokens": TOKENS, "target": setup.target, "draft": setup.draft} | options
    return setup.client.generate(prompt.get("prompt"), messages=prompt.get("messages"), **options)


# Prompts of a category stand together. Unless there is time for all, both modes have two of them.
NUMBERS = range(len(PROMPTS)) if DEEP else (1, 4, 7, 9)
CASES = [(pair, (index, ("lockstep", "opportunistic")[index // 4 % 2])) for pair in PAIRS for index in NUMBERS]


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
    assert len(got) == TOKENS or got[-1] in setup.files.special_ids.eos
    for logits, id_ in zip(setup.logits(prompt_ids, got), got, strict=True):
        assert logits.max() - logits[id_] < NEAR_TIE
    assert result.text == setup.tokenizer.decode(got, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    statistics = result.finished.speculation
    assert statistics.target_pass_count + statistics.num_accepted_tokens == len(got)
    assert statistics.note == ""


def test_the_draft_helps(setup: Setup) -> None:
    # By itself lockstep takes as many tokens as pay on this machine.
    options = {"speculation": "lockstep", "num_assistant_tokens": 4}
    results = [ask(setup, prompt, **options).finished for prompt in PROMPTS[4:8:2]]
    accepted = sum(result.speculation.num_accepted_tokens for result in results)
    passes = sum(result.speculation.target_pass_count for result in results)
    print(f"{accepted} tokens accepted in {passes} passes")
    assert accepted > 0.5 * passes


SAMPLING = [
    *([{"temperature": 0.3}] if DEEP else []),
    {"temperature": 0.7, "top_p": 0.95, "frequency_penalty": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda options: f"T={options['temperature']}")
def test_a_seed_gives_the_same_text_in_every_mode_and_it_is_what_the_models_own_logits_give(
    setup: Setup, sampling: dict[str, Any]
) -> None:
    prompt = PROMPTS[6]
    options = {"seed": 11, "max_tokens": 12} | sampling
    alone = ask(setup, prompt, speculation="off", **options)
    # An odd and an even number of tokens in turns, and drafting ahead.
    ways = [("lockstep", 2), ("lockstep", 9), ("opportunistic", None)]
    for mode, length in ways if DEEP else [ways[SAMPLING.index(sampling) % 3]]:
        result = ask(setup, prompt, speculation=mode, num_assistant_tokens=length, **options)
        assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
    expected, near_tie = setup.sampled(setup.prompt_ids(prompt), alone.token_ids, options)
    assert expected == list(alone.token_ids)[: len(expected)]
    assert near_tie or len(expected) == len(alone.token_ids)


SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["naïve", "advanced"]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 1},
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
    for mode in ("lockstep", "opportunistic", "auto") if DEEP else ("lockstep" if temperature else "auto",):
        result = ask(setup, prompt, speculation=mode, **demanded)
        assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
        if mode == "auto":
            counted = {one.name: one for one in result.finished.speculation.sources}
            assert counted["grammar"].num_accepted_tokens > 0
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    expected, near_tie = setup.sampled(setup.prompt_ids(prompt), alone.token_ids, options, grammar)
    assert expected == list(alone.token_ids)[: len(expected)]
    assert near_tie or len(expected) == len(alone.token_ids)


# The last test, because it leaves the pair without its draft, and another pair without its target.
@pytest.mark.parametrize("setup", PAIRS[:1], indirect=True)
def test_a_draft_killed_half_way_changes_nothing(setup: Setup) -> None:
    prompt = PROMPTS[3]
    sampling = {"temperature": 1.0, "seed": 3}
    expected = ask(setup, prompt, speculation="off", **sampling)
    events = []
    options = sampling | {"max_tokens": TOKENS, "target": setup.target, "speculation": "lockstep"}
    for event in setup.client.stream(prompt["prompt"], **options):
        events.append(event)
        if sum(isinstance(one, bridge_pb2.GenerateDelta) for one in events) == 5:
            os.kill(setup.draft_process.pid, signal.SIGKILL)
    result = Generation.of(events)
    assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
    assert "went on without it" in result.finished.speculation.note
    # And without any draft from the start:
    later = ask(setup, prompt, speculation="lockstep", draft="", **sampling)
    assert (later.text, later.token_ids) == (expected.text, expected.token_ids)
