"""vLLM itself, with a tiny model, and its candidates from a bridge and a draft that run as processes.

One server has little memory for keys and values, reads prompts in chunks and has a prefix cache, so that rows of its
batch are preempted, split and shared. `benchmarks.vllm_ways` turns candidates on and off in it.
"""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from scipy.stats import chi2_contingency

from benchmarks.delay import DelayProxy
from benchmarks.vllm_server import VllmServer, speculation, vllm_server
from benchmarks.vllm_ways import ALWAYS, LOCAL, OURS, PLAIN, WAYS
from services.cli.processes import launched, serve
from tests.support.tiny import CORPUS, SPECIALS, vocabulary
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8")
# 24 blocks of 32 tokens are fewer than 8 requests need, so vLLM preempts.
CROWDED = ("--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "24", "--block-size", "32")
# Without binding threads to cores, it starts on one core, too.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
PROMPTS = [{"prompt": text} for line in CORPUS for text in (line, line[len(line) // 3 :], f"{line[:40]} {line[:40]}")]
MAX_TOKENS = 80
_TOKENS = vocabulary("sentencepiece")
_SPELLED = ((id_, _TOKENS.token_bytes(id_)) for id_ in range(len(SPECIALS) + 1, _TOKENS.size))
# Four words, so that the text of a random model repeats itself, and candidates are right now and then.
WORDS = [id_ for id_, data in _SPELLED if len(data) >= 3 and data.isascii()][:4]
GREEDY = {"allowed_token_ids": WORDS, "ignore_eos": True}


@dataclass
class Setup:
    """A server, and the processes that its candidates come from. `bridge_address`: that of the proxy."""

    server: VllmServer
    control: Path
    bridge: "subprocess.Popen[str]"
    draft: "subprocess.Popen[str]"
    restart_bridge: Callable[[], "subprocess.Popen[str]"]
    proxy: DelayProxy

    def turn_to(self, way: str) -> None:
        self.control.write_bytes(bytes([WAYS.index(way)]))

    def complete(self, place: int, max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
        """Returns the greedy text after a prompt."""
        return self.server.complete(PROMPTS[place % len(PROMPTS)], max_tokens, **GREEDY).ids

    def generate(self) -> list[tuple[int, ...]]:
        """Runs all prompts, eight at a time."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.complete, range(len(PROMPTS))))

    def verified(self) -> float:
        """Returns how many candidates vLLM has verified so far."""
        return self.server.counts().get("draft_tokens_total", 0.0)


@pytest.fixture(scope="module")
def setup(
    vllm_python: Path, vllm_target: Path, tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "way").write_bytes(b"\0")
    target, draft = str(vllm_target), str(tiny_models[1])
    with ExitStack() as stack:
        draft_address, draft_process = stack.enter_context(
            serve(draft, "--role", "draft", "--dtype", "float32", "--threads", "1")
        )

        def start(listen: str = "127.0.0.1:0") -> tuple[str, "subprocess.Popen[str]"]:
            options = ("--draft", draft_address, "--listen", listen, "--until-stdin-closes")
            return stack.enter_context(launched("bridge", "bridge", *options))

        address, bridge_process = start()
        proxy = DelayProxy(address, 0.0)
        proxied = stack.enter_context(proxy.running())
        environment = ENVIRONMENT | {"VLLM_WAYS": str(folder), "DRAFTBRIDGE_GUEST_BRIDGE": proxied}
        own = speculation("benchmarks.vllm_ways.Ways", 8)
        server = stack.enter_context(
            vllm_server(vllm_python, target, folder / "log", *OPTIONS, *CROWDED, *own, environment=environment)
        )
        setup = Setup(server, folder / "way", bridge_process, draft_process, lambda: start(address)[1], proxy)
        setup.turn_to(OURS)
        # The adapter connects with the first request, and the bridge learns what candidates cost.
        eventually(lambda: bool(setup.complete(0)) and setup.verified() > 0, 60)
        yield setup


@pytest.fixture(scope="module")
def plain(setup: Setup) -> list[tuple[int, ...]]:
    """Returns the texts of vLLM without candidates."""
    setup.turn_to(PLAIN)
    return setup.generate()


@pytest.fixture(scope="module")
def plain_seconds(setup: Setup, plain: list[tuple[int, ...]]) -> float:
    """Returns how long vLLM takes for these texts without candidates, once it is warm."""
    setup.turn_to(PLAIN)
    began = time.monotonic()
    assert setup.generate() == plain
    return time.monotonic() - began


@contextmanager
def as_fast_as_plain(plain_seconds: float) -> Iterator[None]:
    """Fails if the texts of the block take much longer than without candidates."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 1.5 * plain_seconds + 1


@contextmanager
def candidates(setup: Setup, way: str = OURS) -> Iterator[None]:
    """Fails unless vLLM verifies candidates of this way in the block."""
    setup.turn_to(way)
    before = setup.verified()
    yield
    assert setup.verified() > before


def test_greedy_texts_are_those_of_plain_vllm(setup: Setup, plain: list[tuple[int, ...]]) -> None:
    before = setup.server.counts()["preemptions_total"]
    with candidates(setup):
        for _ in range(3):
            assert setup.generate() == plain
        assert setup.server.counts()["preemptions_total"] > before
        assert [setup.complete(place) for place in range(len(PROMPTS))] == plain


def test_candidates_without_a_bridge(setup: Setup, plain: list[tuple[int, ...]]) -> None:
    with candidates(setup, LOCAL):
        for _ in range(3):
            assert setup.generate() == plain
        assert [setup.complete(place) for place in range(len(PROMPTS))] == plain


def test_requests_that_end_early_disturb_no_other(setup: Setup, plain: list[tuple[int, ...]]) -> None:
    random = Random(0)
    with candidates(setup), ThreadPoolExecutor(8) as pool:
        lengths = [random.choice((1, 3, 10, MAX_TOKENS)) for _ in range(3 * len(PROMPTS))]
        asked = [pool.submit(setup.complete, place, length) for place, length in enumerate(lengths)]
        for place in range(8):
            setup.server.abandon(PROMPTS[place], MAX_TOKENS, after=0.02 * place)
        for place, (length, one) in enumerate(zip(lengths, asked, strict=True)):
            assert one.result() == plain[place % len(PROMPTS)][:length]


def test_sampling_has_the_distribution_of_plain_vllm(setup: Setup) -> None:
    """Five tokens, each of which may be one of two, after a text that repeats them in various orders."""
    prompt, pair = _balanced_pair(setup)
    options = {"temperature": 1.0, "allowed_token_ids": pair, "ignore_eos": True, "n": 64}
    cells: dict[str, Counter[tuple[int, ...]]] = {}
    # Without seeds: vLLM for CPUs fails when it reads a prompt in chunks for a request with one.
    for way in (PLAIN, ALWAYS):
        setup.turn_to(way)
        before = setup.verified()
        runs = (setup.server.samples(prompt, 7, **options) for _ in range(40))
        cells[way] = Counter(ids[1:6] for run in runs for ids in run)
        assert (setup.verified() > before + 500) == (way == ALWAYS)
    texts = sorted(cells[PLAIN] | cells[ALWAYS])
    common = [text for text in texts if cells[PLAIN][text] + cells[ALWAYS][text] >= 20]
    table = [[cells[way][text] for text in common] for way in cells]
    assert len(common) > 4
    result = chi2_contingency(table)
    assert result.pvalue > 0.001, table


def _balanced_pair(setup: Setup) -> tuple[dict[str, list[int]], list[int]]:
    """Returns a prompt of two tokens, both of which are likely after it, and these tokens."""
    setup.turn_to(PLAIN)
    for pair in combinations(WORDS, 2):
        prompt = {"prompt": Random(0).choices(pair, k=60)}
        options = {"temperature": 1.0, "allowed_token_ids": list(pair), "ignore_eos": True, "n": 64}
        counts = Counter(token for ids in setup.server.samples(prompt, 7, **options) for token in ids)
        if min(counts[token] for token in pair) > 0.2 * counts.total():
            return prompt, list(pair)
    raise AssertionError("the model prefers one token of each pair")


@pytest.mark.parametrize("delay", [0.5, None], ids=["slow", "hung"])
def test_a_slow_or_hung_bridge(
    setup: Setup, plain: list[tuple[int, ...]], plain_seconds: float, delay: float | None
) -> None:
    setup.turn_to(OURS)
    setup.proxy.set_delay(delay)
    try:
        with as_fast_as_plain(plain_seconds):
            assert setup.generate() == plain
    finally:
        setup.proxy.set_delay(0.0)
    _recovers(setup, plain)


def test_a_stopped_bridge(setup: Setup, plain: list[tuple[int, ...]], plain_seconds: float) -> None:
    setup.turn_to(OURS)
    os.kill(setup.bridge.pid, signal.SIGSTOP)
    try:
        with as_fast_as_plain(plain_seconds):
            assert setup.generate() == plain
    finally:
        os.kill(setup.bridge.pid, signal.SIGCONT)
    _recovers(setup, plain)


def test_a_killed_draft_and_a_killed_and_restarted_bridge(
    setup: Setup, plain: list[tuple[int, ...]], plain_seconds: float
) -> None:
    setup.turn_to(OURS)
    with ThreadPoolExecutor(1) as pool:
        for process in (setup.draft, setup.bridge):
            _recovers(setup, plain)  # from what the tests before this one did to the bridge
            before = setup.verified()
            texts = pool.submit(setup.generate)
            eventually(lambda before=before, texts=texts: setup.verified() > before or texts.done())
            process.kill()
            with as_fast_as_plain(plain_seconds):
                assert texts.result() == plain
    setup.bridge.wait()
    with as_fast_as_plain(plain_seconds):
        assert setup.generate() == plain
    setup.bridge = setup.restart_bridge()
    _recovers(setup, plain)


def _recovers(setup: Setup, plain: list[tuple[int, ...]]) -> None:
    """Candidates return, and change no text."""
    before = setup.verified()

    def returned() -> bool:
        assert setup.generate() == plain
        return setup.verified() > before

    eventually(returned, 60)


def test_tensor_parallel(vllm_python: Path, vllm_target: Path, tmp_path: Path) -> None:
    """Of two workers, one asks and both verify."""
    target, control = str(vllm_target), tmp_path / "way"
    control.write_bytes(bytes([WAYS.index(PLAIN)]))
    with launched("bridge", "bridge", "--listen", "127.0.0.1:0", "--until-stdin-closes") as (address, _):
        options = (*OPTIONS, "--tensor-parallel-size", "2")
        own = speculation("benchmarks.vllm_ways.Ways", 8)
        environment = ENVIRONMENT | {"VLLM_WAYS": str(tmp_path), "DRAFTBRIDGE_GUEST_BRIDGE": address}
        with vllm_server(vllm_python, target, tmp_path / "log", *options, *own, environment=environment) as server:

            def texts() -> list[tuple[int, ...]]:
                return [server.complete(prompt, MAX_TOKENS, **GREEDY).ids for prompt in PROMPTS]

            def candidates_came() -> bool:
                assert texts() == plain
                return server.counts().get("draft_tokens_total", 0.0) > 0

            plain = texts()
            control.write_bytes(bytes([WAYS.index(ALWAYS)]))
            eventually(candidates_came, 60)
