"""Chat templates from model servers run in processes with limits, so that an excessive one harms no other request."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from time import monotonic
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import DraftBridgeError, UnusableModel
from bridge.text.chat import Chat, Message, end_of_turn, render_chat
from services.errors import SandboxBusy, TemplateLimitExceeded
from services.sandbox import answering_process, templates
from services.sandbox.jinja import run_template
from services.sandbox.templates import TemplateSandbox
from tests.conftest import CHAT_TEMPLATE
from tests.support import tiny
from tests.support.template_bombs import MEMORY_BOMBS, SURROGATE, TEXT_BOMBS, TIME_BOMBS
from tests.support.waiting import eventually

Workers = Callable[[], list[psutil.Process]]

MARKS = "\ufdd0\ufdd1"
VARIABLES = {"messages": [{"role": "user", "content": "hello"}], "bos_token": "<s>"}

# These templates are written like those on the hub.
TEMPLATES = {
    "chat": CHAT_TEMPLATE,
    "trimmed": "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}{{ m.content[1:3] }}\n{% endfor %}",
    "tools": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2, ensure_ascii=True) }}{% endfor %}",
    "json that is cut": "{% set out = messages | tojson %}{{ out[:-1] ~ ', \"id\": ' ~ messages | length ~ out[-1:] }}",
    "macros": "{% macro say(m) %}<{{ m.content | replace('a', 'b') }}>{% endmacro %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content is none %}{% continue %}{% endif %}"
    "{{ say(m) }}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
    "refusing": "{% if messages | length > 1 %}{{ raise_exception('not ' ~ messages[0].content) }}{% endif %}",
    "broken": "{{ messages[0].content + 1 }}",
    "surrogate": SURROGATE,
}

ANY_TEXT = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"]), st.sampled_from("<>a" + MARKS)))
ANY_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANY_TEXT, inner, max_size=3)),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ANY_TEXT, "content": ANY_TEXT}, optional={"tool_calls": ANY_VALUE}), max_size=3
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    """Yields a sandbox shared by the tests that do not change it. On a busy machine, they may take long."""
    with closing(TemplateSandbox(time_limit=60.0)) as sandbox:
        yield sandbox


def shield(text: str) -> str:
    """Inserts a mark wherever a control token may begin."""
    return text.replace("<", "<" + MARKS[0])


def run(sandbox: Callable[..., str], template: str, variables: Any = VARIABLES) -> str:
    return sandbox(template, variables, MARKS, shield)


def outcome(runner: Callable[..., str], template: str, variables: Any) -> tuple[type, str]:
    try:
        return str, run(runner, template, variables)
    except DraftBridgeError as error:
        return type(error), str(error)


@pytest.fixture
def workers() -> Workers:
    """Returns the processes that were started since the test began and that are still running."""
    children = psutil.Process().children
    before = children()

    def runs(child: psutil.Process) -> bool:
        try:
            return child.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended since it was listed
            return False

    return lambda: [child for child in children() if child not in before and runs(child)]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(messages=MESSAGES, bos=ANY_TEXT)
def test_a_template_writes_the_same_in_the_sandbox(
    sandbox: TemplateSandbox, template: str, messages: list[dict[str, Any]], bos: str
) -> None:
    variables = {"messages": messages, "bos_token": bos, "add_generation_prompt": True}
    assert outcome(sandbox, template, variables) == outcome(run_template, template, variables)


@pytest.mark.parametrize("kind", tiny.EXACT_KINDS)
@given(
    contents=st.lists(
        st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("<eos>turn"))),
        min_size=1,
        max_size=3,
    )
)
def test_a_chat_has_the_same_ids_from_the_sandbox(sandbox: TemplateSandbox, kind: str, contents: list[str]) -> None:
    chat = Chat(tuple(Message("user", content, {"calls": [content]}) for content in contents))
    template = CHAT_TEMPLATE + "{{ messages | tojson }}"
    outside = tiny.model(kind, chat_template=template)
    inside = replace(outside, run_template=sandbox)
    assert render_chat(inside, chat).ids == render_chat(outside, chat).ids
    assert end_of_turn(inside) == 2


@pytest.mark.parametrize("template", MEMORY_BOMBS.values(), ids=MEMORY_BOMBS)
def test_a_template_that_would_fill_the_memory_is_stopped(sandbox: TemplateSandbox, template: str) -> None:
    with pytest.raises(TemplateLimitExceeded, match=r"512 MiB of memory.*fix the template.*send a prompt") as caught:
        run(sandbox, template)
    assert caught.value.metadata["limit"] == "memory"


def test_a_time_shorter_than_a_system_call_waits_is_kept() -> None:
    """A template that asks for one thing after another would never exceed it otherwise."""
    with closing(TemplateSandbox(time_limit=1e-6)) as sandbox, pytest.raises(TemplateLimitExceeded):
        run(sandbox, "x")


@pytest.mark.parametrize("template", TIME_BOMBS.values(), ids=TIME_BOMBS)
def test_a_template_that_would_run_forever_is_stopped(template: str) -> None:
    with closing(TemplateSandbox(time_limit=0.5)) as sandbox:
        started = monotonic()
        with pytest.raises(TemplateLimitExceeded, match=r"more than 0\.5 s.*fix the template") as caught:
            run(sandbox, template)
        assert caught.value.metadata["limit"] == "time"
        assert monotonic() - started < 40


@pytest.mark.parametrize("template", TEXT_BOMBS.values(), ids=TEXT_BOMBS)
def test_a_template_that_writes_too_much_is_stopped(sandbox: TemplateSandbox, template: str) -> None:
    with pytest.raises(TemplateLimitExceeded, match="8000000 characters") as caught:
        run(sandbox, template)
    assert caught.value.metadata["limit"] == "text"


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% nothing %}"])
def test_a_template_that_fails_fails_there_as_it_does_here(sandbox: TemplateSandbox, template: str) -> None:
    with pytest.raises(UnusableModel, match="chat template failed"):
        run(sandbox, template)


def test_json_of_values_in_the_template_has_the_marks_of_this_chat(sandbox: TemplateSandbox) -> None:
    template = "{{ {'a': '<b>'} | tojson }}"
    for mark in "12":
        assert sandbox(template, VARIABLES, mark, lambda text, mark=mark: mark + text) == mark + '{"a": "<b>"}'


def test_the_next_chat_works_after_every_limit() -> None:
    """All bombs are in one template, so that each of them hits a new process."""
    cases = {**MEMORY_BOMBS, "loops": TIME_BOMBS["loops in loops"], **TEXT_BOMBS}
    template = "{{ bos_token }}" + "".join(
        f"{{% if name == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in cases.items()
    )
    with closing(TemplateSandbox(time_limit=3.0)) as sandbox:
        for name in cases:
            with pytest.raises(TemplateLimitExceeded):
                run(sandbox, template, VARIABLES | {"name": name})
            assert run(sandbox, template, VARIABLES | {"name": ""}) == "<s>"


def test_a_process_that_is_killed_is_replaced_also_in_the_middle(workers: Workers) -> None:
    template, kills = "{{ messages | tojson }}", 0

    def kill_and_shield(text: str) -> str:
        nonlocal kills
        if kills:
            kills -= 1
            (process,) = workers()
            process.kill()
        return text

    with closing(TemplateSandbox()) as sandbox:
        expected = sandbox(template, VARIABLES, "", kill_and_shield)
        (process,) = workers()
        process.kill()
        assert sandbox(template, VARIABLES, "", kill_and_shield) == expected
        kills = 1
        assert sandbox(template, VARIABLES, "", kill_and_shield) == expected
        kills = 2
        with pytest.raises(UnusableModel, match="its process ended with status -9"):
            sandbox(template, VARIABLES, "", kill_and_shield)
        assert sandbox(template, VARIABLES, "", kill_and_shield) == expected
        assert len(workers()) == 1
    assert workers() == []


@pytest.mark.parametrize("answer", [b"\xff\xfe", b"hacked\nx", b""])
@pytest.mark.parametrize("at_start", [True, False])
def test_what_a_process_answers_that_was_taken_over_is_no_bug_of_the_bridge(
    answer: bytes, at_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [answer] if at_start else [b"ready\n", answer]
    script = (
        "import multiprocessing.connection as m, os; c = m.Connection(os.dup(0)); "
        f"[(c.send_bytes(one), c.recv()) for one in {answers}]; c.recv()"
    )
    monkeypatch.setattr(answering_process, "command", lambda *_: [sys.executable, "-c", script])
    error: type[DraftBridgeError] = SandboxBusy if at_start else UnusableModel
    with closing(TemplateSandbox()) as sandbox, pytest.raises(error, match=r"protocol|ended with status -9"):
        sandbox("x", VARIABLES, "", str)


def test_what_goes_wrong_with_shielding_is_not_the_templates_fault(sandbox: TemplateSandbox) -> None:
    def fail(text: str) -> str:
        raise RuntimeError("ours")

    template = "{{ messages | tojson }}"
    with pytest.raises(RuntimeError, match="ours"):
        sandbox(template, VARIABLES, "", fail)
    assert sandbox(template, VARIABLES, "", str.upper) == '[{"ROLE": "USER", "CONTENT": "HELLO"}]'


def test_a_template_that_hangs_delays_no_other(workers: Workers) -> None:
    hanging, other = TIME_BOMBS["loops in loops"], "{{ bos_token }}"
    with closing(TemplateSandbox(time_limit=4.0)) as sandbox, ThreadPoolExecutor() as threads:
        assert run(sandbox, other) == "<s>"
        hung = threads.submit(run, sandbox, hanging)
        eventually(lambda: len(workers()) == 2)
        assert run(sandbox, other) == "<s>"
        assert not hung.done()
        assert isinstance(hung.exception(), TemplateLimitExceeded)


def test_a_template_that_hung_before_keeps_no_second_chat_waiting() -> None:
    template = "{% if hang %}" + TIME_BOMBS["loops in loops"] + "{% endif %}{{ [bos_token] | tojson }}"
    shielding, go_on = threading.Event(), threading.Event()

    def wait_and_shield(text: str) -> str:
        shielding.set()
        assert go_on.wait(60)
        return text

    with closing(TemplateSandbox(time_limit=2.0)) as sandbox, ThreadPoolExecutor() as threads:
        with pytest.raises(TemplateLimitExceeded):
            run(sandbox, template, VARIABLES | {"hang": True})
        running = threads.submit(sandbox, template, VARIABLES, "", wait_and_shield)
        assert shielding.wait(60)
        with pytest.raises(SandboxBusy, match=r"running for other chats.*try again") as caught:
            run(sandbox, template)
        assert caught.value.metadata["retry_seconds"]
        go_on.set()
        assert running.result() == '["<s>"]'
        # The template did not hang this time, so that chats wait for one another again.
        assert list(threads.map(lambda _: sandbox(template, VARIABLES, "", str), range(8))) == ['["<s>"]'] * 8


def test_a_sandbox_that_is_closed_stops_what_is_running(workers: Workers) -> None:
    with ThreadPoolExecutor() as threads:
        with closing(TemplateSandbox(time_limit=60.0)) as sandbox:
            hung = threads.submit(run, sandbox, TIME_BOMBS["loops in loops"])
            eventually(lambda: any(one.cpu_times().user > 0.5 for one in workers()))
        assert isinstance(hung.exception(60), SandboxBusy)
        assert workers() == []
        with pytest.raises(SandboxBusy, match="stopping"):
            run(sandbox, "x")


def test_a_process_of_the_sandbox_gets_none_of_the_environments_secrets(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with closing(TemplateSandbox()) as sandbox:
        assert run(sandbox, "{{ bos_token }}") == "<s>"
        (process,) = workers()
        environment = process.environ()
    assert environment["TZ"] == "Asia/Tokyo"
    assert environment.keys() <= {"TZ", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "RAYON_NUM_THREADS", "LC_CTYPE"}


def test_old_templates_give_up_their_processes(workers: Workers) -> None:
    with closing(TemplateSandbox(max_templates=2)) as sandbox:
        for number in (1, 2, 1, 3):
            assert run(sandbox, f"{number}") == str(number)
        assert list(sandbox._workers) == ["1", "3"]
        assert len(workers()) == 2


def test_a_running_template_keeps_its_process() -> None:
    shielding, go_on = threading.Semaphore(0), threading.Event()

    def wait_and_shield(text: str) -> str:
        shielding.release()
        assert go_on.wait(60)
        return text

    with closing(TemplateSandbox(max_templates=2)) as sandbox, ThreadPoolExecutor() as threads:

        def start(name: str) -> Future[str]:
            started = threads.submit(sandbox, f"{{{{ '{name}' | tojson }}}}", VARIABLES, "", wait_and_shield)
            assert shielding.acquire(timeout=60)
            return started

        running = [start("first")]
        for number in (1, 2):  # each takes the place of the idle one, which is not the oldest
            assert run(sandbox, f"{number}") == str(number)
        running.append(start("second"))
        with pytest.raises(SandboxBusy, match="2 other templates are running"):
            run(sandbox, "3")
        go_on.set()
        assert [one.result() for one in running] == ['"first"', '"second"']
        assert run(sandbox, "3") == "3"


def test_a_chat_that_is_about_to_run_keeps_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_chat, about_to_run, go_on = templates._Worker.run, threading.Event(), threading.Event()

    def wait_and_run(worker: Any, variables: Any, marks: str, shield: Callable[[str], str]) -> Any:
        if worker._template == "first":
            about_to_run.set()
            assert go_on.wait(60)
        return run_chat(worker, variables, marks, shield)

    monkeypatch.setattr(templates._Worker, "run", wait_and_run)
    with closing(TemplateSandbox(max_templates=2)) as sandbox, ThreadPoolExecutor() as threads:
        first = threads.submit(run, sandbox, "first")
        assert about_to_run.wait(60)
        for number in (1, 2):
            assert run(sandbox, f"{number}") == str(number)
        go_on.set()
        assert first.result() == "first"


def test_a_process_that_answers_byte_by_byte_is_stopped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # It sleeps between two bytes, so that each arrives long before the time limit.
    script = (
        "import multiprocessing.connection as m, os, time; c = m.Connection(os.dup(0)); "
        "c.send_bytes(b'ready'); c.recv(); c.recv(); os.write(0, (100).to_bytes(4)); "
        "[(os.write(0, b'x'), time.sleep(0.1)) for _ in range(99)]; c.recv()"
    )
    monkeypatch.setattr(answering_process, "command", lambda *_: [sys.executable, "-c", script])
    with closing(TemplateSandbox(time_limit=0.3)) as sandbox:
        started = monotonic()
        with pytest.raises(TemplateLimitExceeded, match=r"more than 0\.3 s"):
            run(sandbox, "x")
        assert monotonic() - started < 8


def test_a_process_that_reads_nothing_is_stopped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # It sleeps until the sandbox ends it.
    script = (
        "import multiprocessing.connection as m, os, time; c = m.Connection(os.dup(0)); "
        "c.send_bytes(b'ready'); c.recv(); time.sleep(600)"
    )
    monkeypatch.setattr(answering_process, "command", lambda *_: [sys.executable, "-c", script])
    with (
        closing(TemplateSandbox(time_limit=0.1)) as sandbox,
        pytest.raises(TemplateLimitExceeded, match=r"more than 0\.1 s"),
    ):
        run(sandbox, "x", {"messages": "more than a socket holds" * 100_000})


def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering_process, "command", lambda *_: ["/does/not/exist"])
    open_before = psutil.Process().num_fds()
    with closing(TemplateSandbox()) as sandbox, pytest.raises(SandboxBusy, match="does not start") as caught:
        run(sandbox, "x")
    assert caught.value and psutil.Process().num_fds() == open_before
