"""The plug-in for SGLang, in stand-ins of SGLang's registry and worker, against a scripted bridge over gRPC."""

import importlib.metadata
import sys
import tomllib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from bridge.guest import _PROMPT_FACTOR
from draftbridge.guests import sglang as adapter
from tests.support.candidate_bridge import served
from tests.support.scripted_bridge import VOCABULARY, ScriptedBridge, closed_clients, continued
from tests.support.tiny import tokenizer_json
from tests.support.waiting import eventually

REGISTRY: dict[str, Any] = {}
WIDTH = 5


class Algorithm(Enum):
    """As SGLang's SpeculativeAlgorithm: methods that ask the member what it is."""

    EAGLE = auto()
    NGRAM = auto()

    @classmethod
    def register(cls, name: str, *, supports_overlap: bool, spec_class: type) -> Any:
        def decorate(factory: Any) -> Any:
            REGISTRY[name] = spec_class(name, factory, supports_overlap)
            return factory

        return decorate

    def is_eagle(self) -> bool:
        return self == Algorithm.EAGLE

    def is_ngram(self) -> bool:
        return self == Algorithm.NGRAM

    def has_draft_kv(self) -> bool:
        return not self.is_ngram()

    def create_worker(self, server_args: Any) -> type:
        raise AssertionError("SGLang's own worker")


class CustomAlgorithm:
    """As SGLang's CustomSpecAlgo."""

    def __init__(self, name: str, factory: Any, supports_overlap: bool) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap

    def is_ngram(self) -> bool:
        return False

    def create_worker(self, server_args: Any) -> type:
        return self.factory(server_args)


class NgramWorker:
    """The part of SGLang's NGRAMWorker that the plug-in relies on."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.server_args, self.target_worker, self.draft_token_num = server_args, target_worker, WIDTH
        self.enable_overlap = server_args.overlap
        self.ngram_corpus: Any = object()
        self.prepared: Any = None

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        if batch.forward_mode.is_decode():
            self.prepared = self._prepare_draft_tokens(batch)

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        raise AssertionError("SGLang's own candidates")


class Group(SimpleNamespace):
    """A tensor-parallel group, of which this process is `rank_in_group`."""

    def broadcast_object(self, found: Any, src: int) -> Any:
        self.sent.append(found)
        return found if self.rank_in_group == src else self.received


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    REGISTRY.clear()
    group = Group(rank_in_group=0, world_size=2, sent=[], received=None)
    parallel = SimpleNamespace(tp_group=group, dp_rank=None)
    for name, values in {
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": Algorithm},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": CustomAlgorithm},
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": NgramWorker},
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    adapter.register()
    with closed_clients(monkeypatch):
        yield REGISTRY["DRAFTBRIDGE"].create_worker(None)


@pytest.fixture
def arguments(tmp_path: Any) -> dict[str, Any]:
    file = tmp_path / "tiny" / "tokenizer.json"
    file.parent.mkdir()
    file.write_bytes(tokenizer_json("byte_level"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<eos>")
    path = str(file.parent)
    config = SimpleNamespace(
        model_path=path, dtype="torch.float16", context_len=96, vocab_size=VOCABULARY, hf_eos_token_id={2, 3}
    )
    runner = SimpleNamespace(model_config=config, device="cuda", gpu_id=1)
    target = SimpleNamespace(tokenizer=tokenizer, model_runner=runner)
    server_args = SimpleNamespace(
        served_model_name=None, tokenizer_path=None, revision=None, overlap=True, tp_size=2, gpu_id_step=2
    )
    return {"server_args": server_args, "gpu_id": 0, "nccl_port": 0, "target_worker": target}


def request(rid: str, prompt: list[int], output: list[int]) -> SimpleNamespace:
    ids = array("q", prompt)
    return SimpleNamespace(rid=rid, origin_input_ids=ids, origin_input_ids_unpadded=ids, output_ids=array("q", output))


def batch(requests: list[SimpleNamespace], added: list[list[int]], *, held: tuple[int, ...] = ()) -> SimpleNamespace:
    """As SGLang hands it over: `added` are the tokens of the last forward, padded to the width.

    `held`: the places of requests that have these tokens already.
    """
    counts = [
        len(one.origin_input_ids) + len(one.output_ids) + (0 if place in held else len(ids))
        for place, (one, ids) in enumerate(zip(requests, added, strict=True))
    ]
    padded = [token for ids in added for token in (*ids, *[0] * (WIDTH - len(ids)))]
    spec = SimpleNamespace(accept_tokens=np.array(padded), accept_lens=np.array([len(ids) for ids in added]))
    lengths = np.array(counts) - 1  # of the caches, which lack the last token
    return SimpleNamespace(
        reqs=requests,
        spec_info=spec,
        seq_lens_cpu=lengths,
        grammar_needs_sync=lambda: False,
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )


def test_the_algorithm_answers_as_ngram_but_has_its_own_worker(worker_class: type) -> None:
    algorithm = REGISTRY["DRAFTBRIDGE"]
    assert algorithm.supports_overlap and algorithm.is_ngram()
    assert not algorithm.is_eagle() and not algorithm.has_draft_kv()
    assert issubclass(worker_class, NgramWorker)


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["sglang.srt.plugins"].items()
    assert importlib.metadata.EntryPoint(name, value, "").load() is adapter.register


@contextmanager
def connected(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, ScriptedBridge]]:
    """Yields a worker that has connected to a bridge whose candidates are right."""
    bridge = ScriptedBridge(wrong=0.0)
    with served(bridge) as address:
        monkeypatch.setenv("DRAFTBRIDGE_GUEST_BRIDGE", address)
        monkeypatch.setenv("DRAFTBRIDGE_GUEST_DEADLINE_MS", "5000")
        worker = worker_class(**arguments)
        eventually(lambda: worker._asker._client.connected)
        yield worker, bridge


def test_trees_are_chains_of_the_bridges_candidates(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(worker_class, arguments, monkeypatch) as (worker, bridge):
        prompts = [[5, 6, 7], [8, 9]]
        generated: list[list[int]] = [[], []]
        for counts in ((1, 3), (2, 1), (4, 1)):
            added = [continued(p + g, count) for p, g, count in zip(prompts, generated, counts, strict=True)]
            requests = [request(str(n), p, g) for n, (p, g) in enumerate(zip(prompts, generated, strict=True))]
            tokens, mask = worker._prepare_draft_tokens(batch(requests, added))
            for place, (prompt, old, new) in enumerate(zip(prompts, generated, added, strict=True)):
                text = prompt + old + new
                row = tokens.reshape(2, WIDTH)[place].tolist()
                assert row == [text[-1], *continued(text, WIDTH - 1)]
                assert (mask.reshape(2, WIDTH, WIDTH)[place] == np.tri(WIDTH, dtype=bool)).all()
                assert bridge.held[place + 1] == text
                generated[place] = old + new
        worker._prepare_draft_tokens(batch(requests[1:], added[1:]))
        assert set(bridge.held) == {2}
    assert bridge.opening.model.engine == "sglang"
    assert len({one.forward_ns for one in bridge.opening.model.forward_costs}) == 1, "all forwards take as long"


def test_only_times_of_one_request_that_ran_alone_are_learned(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of several costs the same with and without candidates. Others ran in between, or read a prompt."""
    with connected(worker_class, arguments, monkeypatch) as (worker, bridge):
        one, other = request("a", [5, 6, 7], []), request("b", [5, 9], [])
        prompt = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False))
        for requests in ([one], [one], [one, other], [one, other], [one], [one], [], [one], [other], [other]):
            if requests:
                worker._prepare_for_speculative_decoding(batch(requests, [[8]] * len(requests)))
                assert worker.prepared[0].tolist()[:2] == [8, *continued([*requests[0].origin_input_ids, 8], 1)]
            else:
                worker._prepare_for_speculative_decoding(prompt)
        run = [step.forward_token_count for step in bridge.steps]
        rows = [len(step.sequences) for step in bridge.steps]
    assert [bool(count) for count in run] == [True, False, True, True, True, False, True, True, False]
    assert all(not count or count > _PROMPT_FACTOR * WIDTH * rows for count, rows in zip(run, rows, strict=True))


def test_the_gpus_of_all_ranks_are_named(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    with connected(worker_class, arguments, monkeypatch) as (_, bridge):
        described = bridge.opening.model
    assert described.device == "cuda" and described.compute_unit_count == 2
    assert [unit.split("/")[1] for unit in described.compute_units] == ["gpu1", "gpu3"]


def test_a_request_that_starts_again_or_reuses_an_id_is_a_new_sequence(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(worker_class, arguments, monkeypatch) as (worker, bridge):
        one = request("a", [5, 6, 7], [])

        def sent(added: list[int]) -> list[int]:
            worker._prepare_draft_tokens(batch([one], [added]))
            (held,) = bridge.held.values()
            text: list[int] = held
            return text

        assert sent([8]) == [5, 6, 7, 8]
        one.output_ids = array("q", [8])
        assert sent([9, 10]) == [5, 6, 7, 8, 9, 10]
        one.output_ids = array("q", [])
        assert sent([8]) == [5, 6, 7, 8], "it has been retracted, and starts again"
        one.output_ids = array("q", [11])
        assert sent([9]) == [5, 6, 7, 11, 9]
        one = request("a", [5, 6, 7], [11, 9])
        assert sent([4]) == [5, 6, 7, 11, 9, 4] and list(bridge.held) == [3]
        one = request("a", [5, 2, 7], [11, 9, 4])
        assert sent([3]) == [5, 2, 7, 11, 9, 4, 3], "another request with the same id"
        steps = [one for step in bridge.steps for one in step.sequences]
        assert [len(one.token_ids) for one in steps] == [4, 2, 4, 5, 1, 7], "known tokens are not sent again"


def test_tokens_that_a_request_got_while_others_were_read_are_not_counted_twice(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler handles the results of a forward after it has started the next one, here a prompt's."""
    with connected(worker_class, arguments, monkeypatch) as (worker, bridge):
        one, other = request("a", [5, 6, 7], [8]), request("b", [5, 9], [])
        worker._prepare_draft_tokens(batch([one], [[9, 10]]))
        one.output_ids.extend([9, 10])
        tokens, _ = worker._prepare_draft_tokens(batch([one, other], [[9, 10], [11]], held=(0,)))
        assert bridge.held == {1: [5, 6, 7, 8, 9, 10], 2: [5, 9, 11]} and tokens[0] == 10
        other.output_ids.append(11)
        worker._prepare_draft_tokens(batch([one, other], [[12], [13, 14]]))
        assert bridge.held == {1: [5, 6, 7, 8, 9, 10, 12], 2: [5, 9, 11, 13, 14]}


def test_a_data_parallel_replica_has_a_name_of_its_own(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_GUEST_ENGINE", "one")
    with connected(worker_class, arguments, monkeypatch) as (_, bridge):
        assert bridge.opening.engine == "one"
    sys.modules["sglang.srt.runtime_context"].get_parallel().dp_rank = 2
    with connected(worker_class, arguments, monkeypatch) as (_, bridge):
        assert bridge.opening.engine == "one-dp2"


def test_without_a_bridge_trees_are_chains_too(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTBRIDGE_GUEST_BRIDGE", "127.0.0.1:9")
    worker = worker_class(**arguments)
    tokens, mask = worker._prepare_draft_tokens(batch([request("a", [5, 6], [])], [[7]]))
    assert tokens.tolist() == [7, 0, 0, 0, 0]
    # Equal children of one token would get more than their chance from SGLang's sampler.
    assert (mask.reshape(WIDTH, WIDTH) == np.tri(WIDTH, dtype=bool)).all()


def test_other_ranks_take_the_first_ranks_candidates(
    worker_class: type, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = sys.modules["sglang.srt.runtime_context"].get_parallel().tp_group
    group.rank_in_group, group.received = 1, [[1, 2]]
    worker = worker_class(**arguments)
    tokens, _ = worker._prepare_draft_tokens(batch([request("a", [5, 6], [])], [[7]]))
    assert tokens.tolist() == [7, 1, 2, 0, 0] and worker._asker._client is None
