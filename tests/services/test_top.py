"""`draftbridge top`: its figures are those of the requests, and it leaves the terminal as it was."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

from draftbridge import Client
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli.processes import Fleet
from services.cli.top import Figures, view
from tests.support.waiting import eventually

PROMPT = "The quick brown fox"


def shown(*arguments: object, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(view("here:1", *arguments))  # type: ignore[arg-type]
    return re.sub(r" +", " ", console.file.getvalue())  # type: ignore[attr-defined]


def status(tokens: int, passes: int, accepted: int, seconds: float, running: int = 0) -> bridge_pb2.GetStatusResponse:
    """Returns a report of two finished generations, and one that is running."""
    speculation = bridge_pb2.SpeculationStatistics(
        target_pass_count=passes, elapsed_ns=2_100_000_000, first_token_ns=100_000_000
    )
    speculation.sources.add(name="draft", num_drafts=10, num_draft_tokens=40, num_accepted_tokens=accepted)
    speculation.plans.add(
        plan="draft ahead", target_pass_count=passes, token_count=tokens, elapsed_ns=10**9,
        predicted_token_count=tokens, predicted_ns=5e8,
    )  # fmt: skip
    answer = bridge_pb2.GetStatusResponse(
        version="9",
        uptime_ns=int(seconds * 1e9),
        finished_count=2,
        failed_count=3,
        refused_count=2,
        generated_token_count=tokens,
        speculation=speculation,
    )
    if running:
        answer.active_count = 1
        one = answer.running.add(target="big", draft="small", elapsed_ns=2 * 10**9, generated_token_count=running)
        one.speculation.target_pass_count, one.speculation.num_draft_tokens = 5, 10
        one.speculation.num_accepted_tokens = 5
        one.speculation.sources.add(name="draft", num_drafts=5, num_draft_tokens=10, num_accepted_tokens=5)
    answer.endpoints.add(address="far:2", role=model_pb2.ROLE_TARGET, reachable=True)
    answer.endpoints.add(address="far:3", role=model_pb2.ROLE_DRAFT, problem="it is [red]away")
    return answer


def test_figures_since_the_start() -> None:
    text = shown(status(100, 50, 20, 10.0, running=20))
    assert "1 running, 2 finished, 1 failed, 2 refused, 0 cancelled" in text
    assert "speed, since the start" in text
    # 120 tokens and 55 passes in 10 s; 50 ms to each of two first tokens; 2 s for 98 further ones.
    assert "12.0 5.5 2.18 50.0 ms 20.41 ms" in text
    assert "draft 5.0 2.5 50% 3.3" in text
    assert "draft ahead 100% 100.0 200.0 0.50x" in text
    assert "big small 2.0 s 20 10.0 50%" in text
    assert "far:2 target ready" in text and "far:3 draft it is [red]away" in text
    many = status(100, 50, 20, 10.0, running=20)
    many.active_count = 101
    assert "requests, 1 of 101" in shown(many) and "requests," not in text


def test_nothing_is_cut_on_a_narrow_terminal() -> None:
    text = shown(status(100, 50, 20, 10.0, running=20), width=40)
    assert "…" not in text and max(map(len, text.splitlines())) <= 40
    assert "tokens/pass 2.18" in text and "time per token 20.41 ms" in text and "plan draft ahead" in text


def test_figures_of_an_interval_are_differences_and_never_negative() -> None:
    before, after = status(100, 50, 20, 10.0, running=20), status(160, 70, 32, 12.0)
    text = shown(after, before)
    assert "speed, the last 2.0 s" in text
    assert "20.0 7.5 2.67 - 0.00 ms" in text, "40 tokens and 15 passes in 2 s, no first token"
    assert "draft 0.0 3.5 - -" in text, "candidates of the generation that failed are gone"
    assert Figures.of(before).since(Figures.of(after)).tokens == 0
    assert "speed, since the start" in shown(before, after), "the bridge has started again"


def test_an_idle_bridge_has_no_figures() -> None:
    assert "0.0 0.0 - - -" in shown(bridge_pb2.GetStatusResponse(version="9", uptime_ns=3_700 * 10**9))
    assert "up 1 h 01 min" in shown(bridge_pb2.GetStatusResponse(version="9", uptime_ns=3_700 * 10**9))


def test_once_prints_what_the_requests_did(tiny_fleet: Fleet, client: Client) -> None:
    client.generate(PROMPT, max_tokens=20, speculation="lockstep")
    state = client.status()
    command = [sys.executable, "-m", "services.cli", "top", "--server", tiny_fleet.bridge, "--once"]
    environment = os.environ | {"COLUMNS": "140"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    text = re.sub(r" +", " ", done.stdout)
    failed = state.failed_count - state.refused_count
    assert f"{state.finished_count} finished, {failed} failed, {state.refused_count} refused" in text
    assert f"{tiny_fleet.target} target ready" in text and f"{tiny_fleet.draft} draft ready" in text
    figures = Figures.of(state)
    assert f" {figures.tokens / figures.passes:.2f} " in text
    for source in state.speculation.sources:
        if source.num_draft_tokens:
            assert f"{source.num_accepted_tokens / source.num_draft_tokens:.0%}" in text
    for plan in state.speculation.plans:
        assert plan.plan in text
    assert "\x1b" not in done.stdout


def test_a_running_request_is_listed(client: Client) -> None:
    eventually(lambda: client.status().active_count == 0)  # requests of other tests
    for _ in range(50):  # a request may end before its status is read
        stream = client.stream(PROMPT, max_tokens=220, ignore_eos=True)
        sent = 0
        for event in stream:
            sent += len(event.token_ids) if isinstance(event, bridge_pb2.GenerateDelta) else 0
            if sent > 5:
                break
        if found := client.status().running:
            break
        stream.close()  # type: ignore[attr-defined]
    [running] = found
    assert (running.target, running.draft) == ("tiny-target", "tiny-draft")
    assert running.generated_token_count >= sent and running.speculation.target_pass_count > 0
    assert running.elapsed_ns > 0
    stream.close()  # type: ignore[attr-defined]


def test_without_a_terminal_or_a_bridge_it_says_what_to_do(tiny_fleet: Fleet) -> None:
    for options, words in (
        (("--server", tiny_fleet.bridge), "use --once"),
        (("--server", "127.0.0.1:1", "--once"), "nothing answers at 127.0.0.1:1"),
    ):
        command = [sys.executable, "-m", "services.cli", "top", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 1 and words in done.stderr


@pytest.mark.parametrize("key", [b"\x03", b""], ids=["Ctrl-C", "SIGTERM"])
def test_the_live_view_leaves_the_terminal_as_it_was(tiny_fleet: Fleet, key: bytes) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    # Opening it makes it the controlling terminal. A `preexec_fn` would do so in a fork of this process, whose other
    # threads may hold locks.
    take_terminal = (
        "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", take_terminal, "-m", "services.cli", "top", "--server", tiny_fleet.bridge]
    command += ["--interval", "0.1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    output, deadline = b"", time.monotonic() + 60
    asked = False
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.1)[0]:
            if process.poll() is not None:
                break
            continue
        output += os.read(master, 65536)
        if not asked and output.count(b"what the planner chooses") >= 3:  # it goes on updating
            asked = True
            if key:
                os.write(master, key)
            else:
                process.terminate()
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)
    entered, left = output.count(b"\x1b[?1049h"), output.count(b"\x1b[?1049l")
    assert entered == left == 1, "the alternate screen"
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "the cursor is shown again"
    assert b"Traceback" not in output
