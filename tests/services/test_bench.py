"""`draftbridge bench`: prompts of every form, what it concludes from what it measured, and a run on real processes."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from bridge.sampling.sampler import Logits
from draftbridge import Client
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2
from services.bridge.servicer import BridgeServicer
from services.cli import bench
from services.cli.app import app
from services.cli.bench import ALONE, InvalidPrompts, Sample, read_prompts
from services.cli.processes import Fleet, ProcessFailed, launched, pinned
from services.cli.terminal import check_writable
from services.engines.engine import Row
from tests.support.zoo import bridge, hurry, serving, trained


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "one\n\ntwo\n", [{"prompt": "one", "category": ""}, {"prompt": "two", "category": ""}]),
        ("a.txt", "one\x0c\u2028two\r\n", [{"prompt": "one\x0c\u2028two", "category": ""}]),
        ("a.txt", "\ufeffone\n", [{"prompt": "one", "category": ""}]),
        ("a.json", '[{"prompt": "one", "category": "x"}]', [{"prompt": "one", "category": "x"}]),
        (
            "a.jsonl",
            '{"turns": ["hi", "more"], "category": "chat"}\n{"prompt": "p"}\n',
            [
                {"messages": [{"role": "user", "content": "hi"}], "category": "chat"},
                {"prompt": "p", "category": ""},
            ],
        ),
        (
            "a.json",
            '["one", {"prompt": "two"}]',
            [{"prompt": "one", "category": ""}, {"prompt": "two", "category": ""}],
        ),
        ("a.jsonl", '"one\u2028two"\n', [{"prompt": "one\u2028two", "category": ""}]),
    ],
)
def test_prompts_of_every_form(tmp_path: Path, name: str, text: str, expected: list) -> None:
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == expected


def test_a_count_takes_prompts_evenly_from_the_categories(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": str(n), "category": "ab"[n > 3]} for n in range(6)]))
    assert [one["prompt"] for one in read_prompts(path, 4)] == ["0", "4", "1", "5"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ("[]", "has no prompts"),
        ("\udc80", "utf-8"),
        ('{"prompt": "p"}\n\n{"prompt": ', "line 3 column 12: Expecting value"),
        ('{"prompt": "p"}\n{"turns": []}', "line 2: turns must be a list"),
        ("[" * 100_000, "recursion"),
        ('["x", 3]', "prompt 2: a prompt must be a text or an object"),
        ('[{"text": "no prompt"}]', "prompt 1: it needs either prompt or messages"),
        ('[{"prompt": "p", "messages": []}]', "prompt 1: it needs either prompt or messages"),
        ('[{"prompt": ["a"]}]', "prompt 1: prompt must be a text"),
        ('["x", {"messages": [{"role": "user"}]}]', "prompt 2: messages must be a list of objects"),
        ('[{"prompt": "p", "category": []}]', "prompt 1: category must be a text"),
    ],
)
def test_what_is_not_a_file_of_prompts_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(InvalidPrompts, match=rf"bad\.json .*{words}"):
        read_prompts(path)
    with pytest.raises(InvalidPrompts, match="No such file"):
        read_prompts(tmp_path / "none.json")


def test_our_own_prompts_are_valid() -> None:
    assert len(read_prompts(bench.OWN_PROMPTS)) == 12


def test_a_bridge_is_measured_and_what_was_found_is_written_down(tiny_fleet: Fleet, tmp_path: Path) -> None:
    prompts, found, picture = tmp_path / "p.txt", tmp_path / "found.json", tmp_path / "found.png"
    prompts.write_text(f"The quick brown\n{'too long ' * 200}\nOnce upon\n")
    command = [sys.executable, "-m", "services.cli", "bench", "--server", tiny_fleet.bridge, "--prompts", str(prompts)]
    command += ["--tokens", "12", "--json", str(found), "--plot", str(picture)]
    for _ in range(3):  # a prompt is also left out if the draft is given up in it, because the machine is busy
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "160"})
        assert done.returncode == 0, done.stderr
        if done.stderr.count("is left out") == 1:
            break
    for word in (*bench.WAYS, "tokens/s", "target alone", "2 prompts of 12 tokens"):
        assert word in done.stdout, (word, done.stderr)
    written = json.loads(found.read_text())
    assert "prompt 2 is left out: " in done.stderr and [one["prompt"] for one in written["failures"]] == [1]
    runs = written["runs"]
    assert len(runs) == 2 * len(bench.WAYS)
    by_prompt = {n: {one["text"] for one in runs if one["prompt"] == n} for n in (0, 2)}
    assert all(len(texts) == 1 for texts in by_prompt.values()), "each way gives the target's own text in float32"
    assert picture.read_bytes().startswith(b"\x89PNG")
    command[-6:] = ["--tokens", "4", "--count", "1", "--json", "/dev/full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "160"})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "/dev/full cannot be written" in done.stderr and "target alone" in done.stdout


def test_cores_that_are_not_there_are_refused(tiny_models: tuple[Path, Path]) -> None:
    with pytest.raises(ProcessFailed, match="cores"), pinned([4096]):
        pass
    command = [sys.executable, "-m", "services.cli", "bench", "--target", str(tiny_models[0]), "--draft", "none"]
    refused = {one: f"cores {one} are not all available: choose among" for one in ("4096", "0-99999", "1-0")}
    for cores, words in {"x": "is not a list of cores", **refused}.items():
        done = subprocess.run([*command, "--target-cores", cores], capture_output=True, text=True, check=False)
        assert done.returncode and words in done.stderr.replace("\n", " ")
        assert "starting" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot pin processes")
def test_pinning_ends_with_its_context() -> None:
    before = os.sched_getaffinity(0)
    with pinned([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
        seen = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert seen.stdout.strip() == str({min(before)})
    assert os.sched_getaffinity(0) == before


def test_a_full_disk_is_noticed_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(typer.BadParameter, match="is full: free some space"):
        check_writable(tmp_path / "found.json", "--json")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--json", "nowhere/a.json"], "nowhere does not exist"),
        (["--json", "."], ". cannot be written"),
        (["--plot", "a.xyz"], "cannot draw a.xyz"),
        (["--plot", "a.pgf"], "cannot draw a.pgf"),
        (["--json", "a.svg", "--plot", "a.svg"], "it is the file of --json"),
        (["--engine", "torch"], "of a running bridge, the first usable pair is measured"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_measured(option: list[str], words: str) -> None:
    command = [sys.executable, "-m", "services.cli", "bench", "--server", "127.0.0.1:1", *option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "160"})
    assert done.returncode and words in done.stderr, done.stderr


class TwoDrafts(bridge_pb2_grpc.BridgeServiceServicer):
    """A bridge with a refused pair and a usable one. A text is the name of its draft; the draft is lost on demand."""

    refusals: ClassVar = {"refused": "the only replica", "used": ""}

    def Generate(  # noqa: N802
        self, request: bridge_pb2.GenerateRequest, context: object
    ) -> Iterator[bridge_pb2.GenerateResponse]:
        did = bridge_pb2.SpeculationStatistics(elapsed_ns=9, target_pass_count=2)
        did.note = "the draft was lost" if request.prompt == "lose it" else ""
        yield bridge_pb2.GenerateResponse(started=bridge_pb2.GenerateStarted())
        for text in (f"{request.target} {request.draft}", ""):
            delta = bridge_pb2.GenerateDelta(text=text, token_ids=[1])
            yield bridge_pb2.GenerateResponse(delta=delta)
        yield bridge_pb2.GenerateResponse(finished=bridge_pb2.GenerateFinished(speculation=did))

    def ListModels(  # noqa: N802
        self, request: bridge_pb2.ListModelsRequest, context: object
    ) -> bridge_pb2.ListModelsResponse:
        response = bridge_pb2.ListModelsResponse()
        for role, name in ((model_pb2.ROLE_TARGET, "large"), *((model_pb2.ROLE_DRAFT, one) for one in self.refusals)):
            state = bridge_pb2.ServiceState.STATE_AVAILABLE
            response.services.add(role=role, state=state, model=model_pb2.Model(name=name))
        return response

    def ListPairs(  # noqa: N802
        self, request: bridge_pb2.ListPairsRequest, context: object
    ) -> bridge_pb2.ListPairsResponse:
        pairs = [bridge_pb2.Pair(target="large", draft=name, refusal=reason) for name, reason in self.refusals.items()]
        return bridge_pb2.ListPairsResponse(pairs=pairs)


def measured_beside_two_drafts(prompts: Path, found: Path) -> Result:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(TwoDrafts(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        words = ["bench", "--server", address, "--prompts", str(prompts), "--json", str(found)]
        result = CliRunner().invoke(app, words)
        server.stop(None)
    return result


@pytest.mark.parametrize(
    ("refusals", "measured", "left_out"),
    [({"refused": "the only replica", "used": ""}, "large used", [1]), ({"refused": "the only replica"}, " ", [])],
)
def test_a_pair_that_can_run_is_measured_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: dict[str, str], measured: str, left_out: list[int]
) -> None:
    monkeypatch.setattr(TwoDrafts, "refusals", refusals)
    prompts, found = tmp_path / "p.txt", tmp_path / "found.json"
    prompts.write_text("one\nlose it\n")
    result = measured_beside_two_drafts(prompts, found)
    assert result.exit_code == 0, result.output
    written = json.loads(found.read_text())
    assert {one["text"] for one in written["runs"]} == {measured}
    assert ("draft model" in result.output) is ("used" in refusals)
    assert [one["prompt"] for one in written["failures"]] == left_out
    assert ("refused is not measured beside large: the only replica" in result.output) is ("used" not in refusals)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_what_was_measured_before_an_end_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    prompts, found, measure = tmp_path / "p.txt", tmp_path / "found.json", bench.measure
    prompts.write_text("one\ntwo\n")

    def interrupted(*args: Any) -> Iterator[list[Sample] | str]:
        yield next(measure(*args))
        signal.raise_signal(number)

    monkeypatch.setattr(bench, "measure", interrupted)
    usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # they may be ignored, as in a background job
    try:
        result = measured_beside_two_drafts(prompts, found)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    assert result.exit_code == 1 and "measuring stopped: it was interrupted" in result.output
    assert "This is from 1 of 2 prompts." in result.output.replace("\n", " ")
    assert json.loads(found.read_text())["stopped"] == "it was interrupted"


async def test_both_models_have_read_a_prompt_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    of_one_core: dict[str, Any] = {"compute_units": frozenset({"core 0"}), "compute_unit_count": 1}
    target, draft = trained("gpt-2", **of_one_core), trained("llama-3", "draft", **of_one_core)
    read, forward = list[int](), draft.engine.forward

    def recorded(rows: Sequence[Row]) -> list[Logits]:
        read.extend(id_ for row in rows for id_ in row.token_ids)
        return forward(rows)

    monkeypatch.setattr(draft.engine, "forward", recorded)
    pair, prompt = bridge_pb2.Pair(target="gpt-2", draft="draft"), "The quick brown fox jumps over the lazy dog"
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(one)) for one in (target, draft)]
        gateway = await stack.enter_async_context(bridge(addresses[:1], addresses[1:]))
        server = grpc.aio.server()
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(BridgeServicer(gateway), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, None)

        def measured() -> None:
            with Client(address) as client:
                found = list(bench.measure(client, pair, [{"prompt": prompt, "category": ""}], [ALONE], 4, 0.0))
            assert not isinstance(found[0], str), found

        await asyncio.to_thread(measured)
    assert draft.model.vocabulary.spell(read).startswith(prompt.encode())


def test_a_bridge_without_models_is_not_measured() -> None:
    arguments = ("bridge", "--listen", "127.0.0.1:0", "--until-stdin-closes")
    with launched("bridge", *arguments) as (address, _):
        command = [sys.executable, "-m", "services.cli", "bench", "--server", address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "has no model to measure" in " ".join(done.stderr.split())
