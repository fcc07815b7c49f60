"""Eight models in real processes: four real ones, three trained tiny ones, prompt lookup. All pairs are exact."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from draftbridge import CallError, Client
from draftbridge.v1 import model_pb2
from services.cli.processes import launched, serve
from services.store.built_in import SUFFIX
from services.store.resolve import resolve
from tests.support.trained import save_trained_model

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(900)]

REAL = ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct", "gemma-3-270m", "smollm2-135m-instruct")
# The kinds of their tokenizers, and their architectures.
TINY = {
    "tiny-one": ("sentencepiece", "llama"),
    "tiny-two": ("byte_level", "gpt_neox"),
    "tiny-three": ("unigram", "qwen3"),
}
PROMPT = "def is_prime(n):\n"
# The beginning of a text that the tiny models were trained on.
TINY_PROMPT = "The quick brown fox"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["naïve", "advanced"]},
        "steps": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "steps"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a bridge over all models, the targets deterministic, so that no near tie can change a text."""
    root, options = tmp_path_factory.mktemp("zoo"), []
    common = ("--threads", "1", "--kv-memory", "0.3", "--slots", "4")
    with ExitStack() as stack:
        for name in REAL:
            resolve(name, print)
            server = serve(name, "--engine", "ik_llama", "--deterministic", *common)
            options += _both(stack.enter_context(server)[0])
        for seed, (name, (kind, architecture)) in enumerate(TINY.items()):
            path: Path = save_trained_model(root / name, kind, architecture, seed)
            server = serve(str(path), "--dtype", "float32", "--deterministic", *common)
            options += _both(stack.enter_context(server)[0])
        options += ["--draft", stack.enter_context(serve(SUFFIX, "--role", "draft"))[0]]
        bridge = launched("bridge", "bridge", *options, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        yield stack.enter_context(Client(stack.enter_context(bridge)[0]))


def _both(address: str) -> list[str]:
    return ["--target", address, "--draft", address]


@pytest.mark.parametrize("target", [*REAL, *TINY])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_leaves_the_text_of_every_target_as_it_is(zoo: Client, target: str, temperature: float) -> None:
    prompt = PROMPT if target in REAL else TINY_PROMPT
    options: dict[str, Any] = {"target": target, "max_tokens": 24, "temperature": temperature, "seed": 5}
    alone = zoo.generate(prompt, **options, speculation="off")
    assert alone.finished.usage.generated_token_count > 0
    for draft in (*REAL, *TINY, SUFFIX):
        if draft == target:
            with pytest.raises(CallError) as caught:
                zoo.generate(prompt, **options, draft=draft)
            assert caught.value.reason == "PAIR_REFUSED"
            continue
        in_turns = zoo.generate(prompt, **options, draft=draft, speculation="lockstep", num_assistant_tokens=4)
        auto = zoo.generate(prompt, **options, draft=draft)
        for result in (in_turns, auto):
            assert (result.token_ids, result.text) == (alone.token_ids, alone.text), draft
            assert list(result.finished.speculation.drafts) == [draft]
        drafted = next(one for one in in_turns.finished.speculation.sources if one.name == "draft")
        # Models that know the text agree on it. Prompt lookup, and models of the other kind, need not.
        if temperature == 0 and draft != SUFFIX and (draft in REAL) is (target in REAL):
            assert drafted.num_accepted_tokens > 0, draft
        if draft != SUFFIX:
            assert drafted.proposed_token_count > 0, draft


@pytest.mark.parametrize("target", [*REAL, *TINY])
def test_a_chosen_draft_and_those_of_a_list_leave_the_text_as_it_is(zoo: Client, target: str) -> None:
    prompt = PROMPT if target in REAL else TINY_PROMPT
    options: dict[str, Any] = {"target": target, "max_tokens": 24}
    alone = zoo.generate(prompt, **options, speculation="off")
    chosen = zoo.generate(prompt, **options)
    assert (chosen.token_ids, chosen.text) == (alone.token_ids, alone.text)
    assert chosen.finished.speculation.draft_choice.draft == chosen.finished.speculation.drafts[0]
    names = [name for name in (*REAL, *TINY) if name != target][::-1]
    listed = zoo.generate(prompt, **options, drafts=names)
    assert (listed.token_ids, listed.text) == (alone.token_ids, alone.text)
    assert listed.finished.speculation.drafts[0] == names[0]


def test_the_zoo_is_listed_with_its_costs_and_pairs(zoo: Client) -> None:
    services, pairs = zoo.services(), zoo.pairs()
    assert len(services) == 15 and all(one.state == one.STATE_AVAILABLE for one in services)
    # A server whose measurement was disturbed reports no costs; those of targets are known after some passes.
    targets = [one for one in services if one.role == model_pb2.ROLE_TARGET]
    assert all(one.model.forward_costs or one.measured_costs for one in targets)
    assert len(pairs) == 7 * 8 and sum(bool(pair.refusal) for pair in pairs) == 7
    by_names = {(pair.target, pair.draft): pair for pair in pairs}
    assert by_names[REAL[0], REAL[1]].same_tokenizer and by_names[REAL[0], REAL[1]].vocabulary_overlap == 1.0
    assert 0.1 < by_names[REAL[0], REAL[2]].vocabulary_overlap < 0.9


@pytest.fixture(scope="module")
def in_float32() -> Iterator[Client]:
    """A client of a bridge over the four real models, each in float32 and in both roles."""
    with ExitStack() as stack:
        options = []
        for name in REAL:
            server = serve(name, "--engine", "torch", "--dtype", "float32", "--slots", "2", "--kv-memory", "0.3")
            options += _both(stack.enter_context(server)[0])
        bridge = launched("bridge", "bridge", *options, "--listen", "127.0.0.1:0", "--until-stdin-closes")
        yield stack.enter_context(Client(stack.enter_context(bridge)[0]))


@pytest.mark.parametrize("target", REAL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_is_the_same_with_every_draft(in_float32: Client, target: str, temperature: float) -> None:
    options = {"target": target, "max_tokens": 80, "temperature": temperature, "seed": 5, "json_schema": SCHEMA}
    alone = in_float32.generate(PROMPT, **options, speculation="off")  # type: ignore[arg-type]
    jsonschema.validate(json.loads(alone.text), SCHEMA)
    accepted: dict[str, int] = {}
    for draft in (name for name in REAL if name != target):
        for mode in ("lockstep", "auto"):
            result = in_float32.generate(PROMPT, **options, draft=draft, speculation=mode)  # type: ignore[arg-type]
            assert (result.token_ids, result.text) == (alone.token_ids, alone.text), (draft, mode)
            for one in result.finished.speculation.sources:
                accepted[one.name] = accepted.get(one.name, 0) + one.num_accepted_tokens
    assert accepted["grammar"] > 0 and accepted["draft"] > 0
