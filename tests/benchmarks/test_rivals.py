"""Tests the benchmark's rivals as real processes on the tiny models."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.rivals import Entry, Rival, RivalFailed, started
from tests.support.depth import deep_only
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(os.name != "posix", reason="rivals are stopped by signals")

ROOT = Path(__file__).parents[2]
PROMPT = [1, 30, 40, 50, 30, 40, 50]
TOKENS = 24
END = 2


def interpreter(directory: Path, script: str) -> Entry:
    """Returns a rival whose interpreter is a shell script."""
    path = directory / "interpreter"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Entry("vllm", str(path))


def generated(model: Path) -> list[int]:
    """Returns what transformers' `generate` returns in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = torch.tensor([PROMPT])
    found = bare.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=TOKENS, eos_token_id=END,
        pad_token_id=0,
    )  # fmt: skip
    return list(found[0, len(PROMPT) :].tolist())


@deep_only
def test_rivals_say_what_transformers_says(tiny_models: tuple[Path, Path]) -> None:
    target, draft = tiny_models
    options = ["--model", str(target), "--draft", str(draft), "--dtype", "float32", "--threads", "1"]
    entries = [Entry("transformers"), Entry.parse("transformers-assisted"), Entry("llamacpp", "/nowhere/python")]
    messages: list[str] = []
    with started(entries, options, {}, messages.append) as rivals:
        answers = [rival.ask(PROMPT, TOKENS, [END]) for rival in rivals]
        # Idle rivals are stopped, so that they take no processor time from the one that is measured.
        for rival in rivals:
            eventually(lambda rival=rival: psutil.Process(rival.pid).status() == psutil.STATUS_STOPPED)
    plain, assisted = answers
    assert plain.token_ids == assisted.token_ids == generated(target)
    assert plain.pass_count == len(plain.token_ids)
    assert (plain.candidate_count, plain.accepted_count) == (0, 0)
    # The assistant was asked, and no pass was spent on its accepted tokens.
    assert assisted.candidate_count > 0
    assert assisted.pass_count + assisted.accepted_count == len(assisted.token_ids)
    assert all(0 < answer.first_token_ns <= answer.elapsed_ns for answer in answers)
    assert messages[-1] == "llamacpp is left out: /nowhere/python cannot be run: No such file or directory"
    assert not any(psutil.pid_exists(rival.pid) for rival in rivals)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"exec '{sys.executable}' \"$@\"", "ModuleNotFoundError: No module named 'vllm'"),
        ("echo 'no such processor' >&2; exit 3", "it ended with 3: no such processor"),
        ("""echo '{"about": "all well"}'; read line; echo 'out of memory' >&2""", "it ended with 0: out of memory"),
    ],
)
def test_a_rival_that_fails_gives_its_reason(tmp_path: Path, script: str, reason: str) -> None:
    with pytest.raises(RivalFailed) as failure:
        rival = Rival(interpreter(tmp_path, script), ["--model", str(tmp_path)])
        try:
            rival.ask(PROMPT, TOKENS, [])
        finally:
            rival.close()
    assert str(failure.value) == reason


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked for it")
def test_a_stopped_rival_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    loads_nothing = (
        "from benchmarks import rival_process as r; r.RIVALS['vllm'] = lambda options: ('all well', print); r.main()"
    )
    script = f"""shift 2; exec '{sys.executable}' -c "{loads_nothing}" "$@" """
    entry = interpreter(tmp_path, script)
    program = (
        "from benchmarks.rivals import Entry, Rival\n"
        f"rival = Rival(Entry('vllm', {entry.python!r}), ['--model', '']); print(rival.pid, flush=True); input()"
    )
    pipe = subprocess.PIPE
    benchmark = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert benchmark.stdin is not None
    assert benchmark.stdout is not None
    rival = psutil.Process(int(benchmark.stdout.readline()))
    eventually(lambda: rival.status() == psutil.STATUS_STOPPED)
    benchmark.send_signal(signal.SIGKILL)
    benchmark.wait()
    benchmark.stdin.close()
    benchmark.stdout.close()
    assert psutil.wait_procs([rival], timeout=60)[1] == []


def test_an_unknown_rival_is_refused() -> None:
    with pytest.raises(ValueError, match="no rival is called 'magic': there are transformers, "):
        Entry.parse("magic=/usr/bin/python3")
