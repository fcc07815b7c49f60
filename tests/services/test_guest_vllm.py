"""The adapter for vLLM, in a stand-in of vLLM's loop, against a scripted bridge over gRPC."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from draftbridge.guests import description
from draftbridge.guests.settings import InvalidSettings
from draftbridge.guests.vllm import Proposer
from draftbridge.guests.vllm_sampler import expand_batch_to_tokens
from tests.conftest import CHAT_TEMPLATE
from tests.support.candidate_bridge import served
from tests.support.ports import free_address
from tests.support.scripted_bridge import VOCABULARY, ScriptedBridge, closed_clients, continued
from tests.support.tiny import tokenizer_json
from tests.support.waiting import eventually

WIDTH = 96


@dataclass
class Request:
    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    read_count: int = 0
    accepted_count: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) - len(self.prompt) >= self.limit


class Engine:
    """A stand-in of vLLM's loop: prompts in chunks, rows that move, preemption, requests that end early."""

    def __init__(self, proposer: Proposer, rows: int = 4) -> None:
        self.proposer, self.row_count = proposer, rows
        self.waiting: list[Request] = []
        self.rows: list[Request] = []
        self.token_ids = np.zeros((rows, WIDTH), dtype=np.int32)
        self.step_seconds: list[float] = []
        self.random = Random(1)

    def generate(self, prompts: list[list[int]], limit: int, between: float = 0.0) -> list[list[int]]:
        """Returns the generated tokens. `between`: seconds of the forward."""
        requests = [Request(prompt, limit, tokens=list(prompt)) for prompt in prompts]
        self.waiting += requests
        while self.waiting or self.rows:
            self._step()
            threading.Event().wait(between)
        return [one.tokens[len(one.prompt) :][:limit] for one in requests]

    def _step(self) -> None:
        self.rows = [one for one in self.rows if not one.is_done]
        if self.rows and self.random.random() < 0.1:  # preempted: it returns later, in another row
            self.waiting.append(self.rows.pop(self.random.randrange(len(self.rows))))
        if self.random.random() < 0.3:
            self.random.shuffle(self.rows)
        while self.waiting and len(self.rows) < self.row_count:
            self.rows.append(self.waiting.pop(0))
        sampled = [self._forward(one) for one in self.rows]
        for place, one in enumerate(self.rows):
            self.token_ids[place, : len(one.tokens)] = one.tokens
            if one.candidates:  # vLLM leaves the candidates that it verified in the row
                self.token_ids[place, len(one.tokens) : len(one.tokens) + 2] = VOCABULARY - 1
        counts = np.array([len(one.tokens) for one in self.rows] + [0] * 3, dtype=np.int32)
        began = time.monotonic()
        found = self.proposer.propose(sampled, counts, self.token_ids, slot_mappings=None)
        self.step_seconds.append(time.monotonic() - began)
        assert len(found) == len(self.rows)
        for one, candidates in zip(self.rows, found, strict=True):
            assert len(candidates) <= 8 and len(one.tokens) + len(candidates) < WIDTH
            one.candidates = list(candidates)

    def _forward(self, one: Request) -> list[int]:
        """Reads a chunk of the prompt, or verifies the candidates; returns the new tokens."""
        if one.read_count < len(one.prompt):
            one.read_count += 8
            if one.read_count < len(one.prompt):
                return []
        new = continued(one.tokens, 1 + len(one.candidates))
        accepted = next((i for i, (a, b) in enumerate(zip(new, one.candidates, strict=False)) if a != b), None)
        count = len(one.candidates) if accepted is None else accepted
        one.accepted_count += count
        one.tokens += new[: count + 1]
        return new[: count + 1]


class Group(SimpleNamespace):
    """A tensor-parallel group, of which this process is `rank_in_group`: `sent` is what its first rank has sent."""

    def broadcast_object(self, found: Any, src: int) -> Any:
        if self.rank_in_group == src:
            self.sent.append(found)
        return self.sent[-1]


PROMPTS = [[n % VOCABULARY, *(Random(n).choices(range(VOCABULARY), k=n % 25))] for n in range(12)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Returns a stand-in of vLLM's ModelConfig, and puts stand-ins of vLLM's modules on the import path."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json("byte_level"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {"get_tp_group": lambda: Group(rank_in_group=0)},
        "vllm.tokenizers": {"cached_tokenizer_from_config": lambda config: tokenizer},
        "vllm.v1": {},
        "vllm.v1.sample": {"rejection_sampler": SimpleNamespace(expand_batch_to_tokens=expand_batch_to_tokens)},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    with closed_clients(monkeypatch):
        yield SimpleNamespace(
        model="/models/tiny", served_model_name=["tiny"], tokenizer=str(tmp_path), tokenizer_revision=None,
        dtype="torch.bfloat16", max_model_len=WIDTH, hf_config=SimpleNamespace(eos_token_id=[2, 3]),
        get_vocab_size=lambda: VOCABULARY, try_get_generation_config=lambda: {"eos_token_id": 2},
    )  # fmt: skip


def config(
    model: SimpleNamespace,
    replica: int = 0,
    device: str = "cpu",
    stages: int = 1,
    launcher: str = "mp",
    **settings: object,
) -> SimpleNamespace:
    speculative = SimpleNamespace(num_speculative_tokens=8)
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=model,
        parallel_config=SimpleNamespace(
            data_parallel_index=replica,
            tensor_parallel_size=2,
            pipeline_parallel_size=stages,
            distributed_executor_backend=launcher,
        ),
        device_config=SimpleNamespace(device_type=device),
        additional_config={"draftbridge": settings},
    )


@pytest.mark.parametrize("place", ["a directory", "a file", "a repository"])
def test_a_tokenizer_without_a_file_is_written_by_transformers(model: SimpleNamespace, place: str) -> None:
    """A directory may have another format, which transformers converts. Only repositories are in the cache."""
    directory = Path(model.tokenizer)
    (directory / "tokenizer.json").rename(directory / "model.gguf")
    name = {"a directory": model.tokenizer, "a file": str(directory / "model.gguf")}.get(place, "nobody/nothing")
    tokenizer = sys.modules["vllm.tokenizers"].cached_tokenizer_from_config(model)
    assert description.tokenizer_json(name, None, tokenizer) == tokenizer.backend_tokenizer.to_str().encode()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        description.tokenizer_json(name, None, object())


def connected(model: SimpleNamespace, address: str, **settings: object) -> Proposer:
    proposer = Proposer(config(model, bridge=address, **settings))
    proposer.load_model(object())
    assert proposer._client and proposer._client.connect(60)
    return proposer


def unwritten(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Returns what vLLM 0.32 does on a CPU: memory that nothing was written to."""
    return torch.full((num_tokens,), 7, dtype=x.dtype)


def truncated(*arguments: Any, **options: Any) -> torch.Tensor:
    """Returns the right values, but of temperatures only the integer part."""
    return expand_batch_to_tokens(*arguments, **options).trunc()


def right(*arguments: Any, **options: Any) -> torch.Tensor:
    return expand_batch_to_tokens(*arguments, **options)


@pytest.mark.parametrize("found", [unwritten, truncated, right, None])
def test_a_wrong_sampler_is_mended(
    model: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    sampler = sys.modules["vllm.v1.sample"].rejection_sampler
    if found:
        sampler.expand_batch_to_tokens = found
    else:
        monkeypatch.delattr(sampler, "expand_batch_to_tokens")
    with served(ScriptedBridge()) as address:
        connected(model, address)
    used = getattr(sampler, "expand_batch_to_tokens", None)
    assert used is (found if found in (right, None) else expand_batch_to_tokens)
    assert ("replaced its function" in caplog.text) == (found in (unwritten, truncated))
    assert ("could not check" in caplog.text) == (found is None)


def test_each_candidate_gets_its_requests_value() -> None:
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in (torch.tensor([0.5, 1.5, 0.0]), torch.tensor([40, 7, 0], dtype=torch.int32)):
        got = expand_batch_to_tokens(values, counts, 5, replace_from=0, replace_to=1)
        assert got.dtype == values.dtype
        assert got.tolist() == [values[0].item()] * 2 + [1] * 3


def plain(limit: int) -> list[list[int]]:
    return [continued(prompt, limit) for prompt in PROMPTS]


def test_texts_are_plain_ones_and_the_bridge_holds_them(model: SimpleNamespace) -> None:
    bridge = ScriptedBridge()
    with served(bridge) as address:
        proposer = connected(model, address, deadline_ms=10_000)
        engine = Engine(proposer)
        assert engine.generate(PROMPTS, 20) == plain(20)
        counts = proposer._client.counts
        assert counts.candidate_count > 100 and counts.late_count == 0
        # The last forward of a request may have gone beyond its limit.
        texts = [prompt + text for prompt, text in zip(PROMPTS, plain(25), strict=True)]
        assert all(any(text[: len(held)] == held for text in texts) for held in bridge.held.values())
        # Each token is sent once: preempted and moved requests are not sent again.
        assert sum(len(one.token_ids) for step in bridge.steps for one in step.sequences) <= sum(map(len, texts))


def test_a_short_follow_up_is_a_prompt_and_not_a_forward_that_verified_it(model: SimpleNamespace) -> None:
    bridge, text, tokens = ScriptedBridge(wrong=0.0), PROMPTS[1] + plain(40)[1], np.zeros((1, WIDTH), dtype=np.int32)
    tokens[0, : len(text)] = text
    with served(bridge) as address:
        proposer = connected(model, address, deadline_ms=10_000)
        for gained, count in ((1, 4), (5, 9), (1, 20), (5, 25)):
            proposer.propose([text[count - gained : count]], np.array([count]), tokens)
    steps = [(step.forward_token_count, *step.sequences) for step in bridge.steps]
    assert [(run, one.sequence_id, one.candidate_count) for run, one in steps] == [
        (4, 1, 0), (0, 1, 4), (20, 1, 0), (0, 1, 4),
    ]  # fmt: skip


def test_rows_keep_their_sequences_while_vllm_asks_for_none(model: SimpleNamespace) -> None:
    """Near the end of the context of one. When that has ended, the last row takes its place."""
    bridge, texts = ScriptedBridge(wrong=0.0), [prompt + continued(prompt, WIDTH) for prompt in PROMPTS[1:4]]
    tokens = np.array([text[:WIDTH] for text in texts], dtype=np.int32)
    with served(bridge) as address:
        proposer = connected(model, address, deadline_ms=10_000)
        proposer.propose([[texts[0][87]], [texts[1][19]], [texts[2][39]]], np.array([88, 20, 40]), tokens)
        found = proposer.propose([[texts[2][60]], [texts[1][43]]], np.array([61, 44]), tokens[[2, 1]])
    assert found == [texts[2][61:65], texts[1][44:48]]
    assert [(one.sequence_id, one.kept_token_count) for one in bridge.steps[-1].sequences] == [(3, 40), (2, 20)]


def test_the_model_is_described(model: SimpleNamespace) -> None:
    bridge = ScriptedBridge()
    with served(bridge) as address:
        connected(model, address, engine="one", draft="small", sources=["suffix"])
        opening = bridge.opening
        connected(model, address, engine="one", replica=2)
    assert (opening.engine, opening.draft, list(opening.sources)) == ("one", "small", ["suffix"])
    assert bridge.opening.engine == "one-dp2", "a data-parallel replica has a name of its own"
    described = opening.model
    assert (described.name, described.engine, described.dtype) == ("tiny", "vllm", "bfloat16")
    assert (described.context_length, described.vocabulary_size) == (WIDTH, VOCABULARY)
    assert described.special_ids.bos == 1 and list(described.special_ids.eos) == [2, 3]
    assert described.chat_template == CHAT_TEMPLATE
    assert 0 < described.compute_unit_count <= len(described.compute_units)
    assert bridge.tokenizer == tokenizer_json("byte_level")


@pytest.mark.parametrize(("stages", "used"), [(1, {"gpu5", "gpu6"}), (2, {"gpu3", "gpu4", "gpu5", "gpu6"})])
def test_the_gpus_of_all_ranks_are_named(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, stages: int, used: set[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6")
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    bridge = ScriptedBridge()
    with served(bridge) as address:
        connected(model, address, device="cuda", stages=stages)
    described = bridge.opening.model
    assert {unit.split("/")[1] for unit in described.compute_units} == used
    assert described.compute_unit_count == len(used)


def test_a_hung_and_a_lost_bridge_cost_a_few_deadlines_and_no_text(model: SimpleNamespace) -> None:
    bridge = ScriptedBridge()
    with served(bridge) as address:
        proposer = connected(model, address, deadline_ms=200)
        engine = Engine(proposer)
        engine.generate(PROMPTS[:2], 3)
        bridge.hangs.set()
        engine.step_seconds.clear()
        assert engine.generate(PROMPTS, 20) == plain(20)
        waited = sum(seconds >= 0.2 for seconds in engine.step_seconds)
        # On a busy machine, other steps may take as long as those that wait.
        assert len(engine.step_seconds) > 50 and waited < len(engine.step_seconds) / 2, "of many steps, a few wait"
    proposer._deadline = 30.0
    engine.step_seconds.clear()
    assert engine.generate(PROMPTS, 20) == plain(20)
    assert max(engine.step_seconds) < 10, "it waited for a bridge that is lost"


def test_a_restarted_bridge_is_used_again(model: SimpleNamespace) -> None:
    bridge = ScriptedBridge()
    with served(bridge, free_address()) as address:
        proposer = connected(model, address, deadline_ms=2000)
    client = proposer._client
    eventually(lambda: not client.connected)
    assert Engine(proposer).generate(PROMPTS[:3], 20) == plain(20)[:3]
    before = client.counts.candidate_count
    with served(bridge, address):
        eventually(lambda: client.connected)
        assert Engine(proposer).generate(PROMPTS, 20) == plain(20)
        assert client.counts.candidate_count > before


def test_without_a_bridge_candidates_come_from_the_text(model: SimpleNamespace) -> None:
    proposer = Proposer(config(model, bridge="local"))
    proposer.load_model(object())
    engine = Engine(proposer)
    assert engine.generate(PROMPTS, 20) == plain(20)
    # The text of the stand-in repeats after at most 50**3 tokens, and often sooner; some of it is in the prompts.
    repeated = [[1, 2, 3, 4, 5, 6] * 6]
    engine.generate(repeated, 20)
    assert proposer._client and proposer._client.counts.candidate_count > 0
    with pytest.raises(InvalidSettings, match="HOST:PORT"):
        Proposer(config(model, bridge="local", draft="small"))


def test_another_rank_does_not_ask(model: SimpleNamespace) -> None:
    sys.modules["vllm.distributed"].get_tp_group = lambda: Group(rank_in_group=1)
    proposer = Proposer(config(model, bridge="127.0.0.1:9"))
    proposer.load_model(object())
    assert Engine(proposer).generate(PROMPTS, 20) == plain(20)
    assert proposer._client is None


def test_with_an_external_launcher_all_ranks_have_the_first_ranks_candidates(model: SimpleNamespace) -> None:
    """There each rank has a scheduler of its own, which takes the candidates of its own worker."""
    sent: list[Any] = []
    text, tokens = PROMPTS[1] + plain(40)[1], np.zeros((1, WIDTH), dtype=np.int32)
    tokens[0, : len(text)] = text
    call = [text[3:4]], np.array([4]), tokens
    with served(ScriptedBridge(wrong=0.0)) as address:
        ranks = []
        for rank in (0, 1):
            group = Group(rank_in_group=rank, sent=sent)
            sys.modules["vllm.distributed"].get_tp_group = lambda group=group: group
            ranks.append(Proposer(config(model, launcher="external_launcher", bridge=address, deadline_ms=10_000)))
        first, other = ranks
        assert first._client and first._client.connect(60) and other._client is None
        expected = [text[4:8]]
        assert first.propose(*call) == expected and other.propose(*call) == expected
        first._rows = None  # a bug: the others still wait for what the first rank sends
        assert first.propose(*call) == [[]] and other.propose(*call) == [[]]


def test_a_bug_is_logged_once_and_nothing_is_raised(model: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    with served(ScriptedBridge()) as address:
        proposer = connected(model, address)
        for _ in range(3):
            assert proposer.propose([[1], []], None, None) == [[], []]
    assert sum("a bug in DraftBridge" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("given", ["a:1", ["a:1"], 5])
def test_settings_without_names_are_refused(model: SimpleNamespace, given: object) -> None:
    vllm_config = config(model)
    vllm_config.additional_config = {"draftbridge": given}
    with pytest.raises(InvalidSettings, match=r'such as \{"bridge": "HOST:PORT"\}, got'):
        Proposer(vllm_config)


def test_an_engine_without_a_tokenizer_is_refused(model: SimpleNamespace) -> None:
    sys.modules["vllm.tokenizers"].cached_tokenizer_from_config = lambda config: None
    with pytest.raises(ValueError, match="leave out --skip-tokenizer-init"):
        Proposer(config(model))


def test_the_adapter_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'numpy', 'pydantic', 'vllm', 'bridge', 'services'}"
    code = f"import sys, draftbridge.guests.vllm; print(*{heavy} & {{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
