"""Every log line of a request has its id, in all processes, and no line contains anything that a client wrote."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from grpc._cython import cygrpc

from draftbridge import CallError, Client
from draftbridge.v1 import bridge_pb2
from services.logs import LogFormat, LogLevel, configure, read_request_id, request_id
from tests.support.observed import Observed, observed
from tests.support.waiting import eventually

SECRET = "xyzzy"


@pytest.fixture(scope="module")
def trio(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Observed]]:
    """Runs a target, a draft and a bridge that log as JSON."""
    directory = tmp_path_factory.mktemp("logged")
    log = ("--log-format", "json", "--log-level", "info")
    options = ("--dtype", "float32", "--threads", "1", "--slots", "3", *log)
    with ExitStack() as stack:
        services = {
            role: stack.enter_context(observed(directory, role, "serve", str(path), "--role", role, *options))
            for role, path in zip(("target", "draft"), tiny_models, strict=True)
        }
        models = [word for role, one in services.items() for word in (f"--{role}", one.address)]
        options = (*models, *log, "--http", "127.0.0.1:0")
        yield services | {"bridge": stack.enter_context(observed(directory, "bridge", "bridge", *options))}


def lines(one: Observed) -> list[dict]:
    return [json.loads(line) for line in one.log.read_text().splitlines()]


def test_every_process_logs_a_request_under_the_clients_id(trio: dict[str, Observed]) -> None:
    with Client(trio["bridge"].address) as client:
        result = client.generate(f"The quick {SECRET}", max_tokens=8, speculation="lockstep", request_id="job-17:a")
        assert result.started.request_id == "job-17:a"
        with pytest.raises(CallError, match=SECRET) as caught:
            client.generate("The quick", target=SECRET, request_id="job-18")
        assert caught.value.request_id == "job-18"
        made = client.generate("The quick", max_tokens=2).started.request_id
        assert len(made) == 16
    methods = {"bridge": "BridgeService/Generate", "target": "TargetService/Verify", "draft": "DraftService/Draft"}
    for role, method in methods.items():
        for id_ in ("job-17:a", made) if role != "draft" else ("job-17:a",):

            def logged(role: str = role, id_: str = id_, method: str = method) -> bool:
                ours = [one for one in lines(trio[role]) if one.get("request_id") == id_]
                return [one["method"] for one in ours] == [f"draftbridge.v1.{method}"]

            eventually(logged)
    failed = [one for one in lines(trio["bridge"]) if one.get("request_id") == "job-18"]
    assert [(one["code"], one["level"]) for one in failed] == [("NOT_FOUND", "INFO")]
    assert all(SECRET not in one.log.read_text() for one in trio.values())


def test_requests_over_http_have_ids_too(trio: dict[str, Observed]) -> None:
    body = {"model": "tiny-target", "prompt": f"The quick {SECRET}", "max_tokens": 2}
    with httpx.Client(base_url=trio["bridge"].http, timeout=60) as http:
        for sent in ("web-1", f"{SECRET} {SECRET}"):
            answer = http.post("/v1/completions", json=body, headers={"x-request-id": sent})
            assert answer.status_code == 200
            id_ = answer.headers["x-request-id"]
            assert id_ == sent if sent == "web-1" else len(id_) == 16
            eventually(lambda id_=id_: any(one.get("request_id") == id_ for one in lines(trio["target"])))
    assert all(SECRET not in one.log.read_text() for one in trio.values())


def test_the_command_sends_an_id(trio: dict[str, Observed]) -> None:
    command = [sys.executable, "-m", "services.cli", "generate", "The quick", "--server", trio["bridge"].address]
    command += ["--request-id", "from-the-command", "--max-tokens", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout.splitlines()[0])["request_id"] == "from-the-command"


def test_an_id_that_does_not_belong_into_a_log_is_replaced(trio: dict[str, Observed]) -> None:
    import grpc

    from draftbridge.v1 import bridge_pb2_grpc

    with grpc.insecure_channel(trio["bridge"].address) as channel:
        stub = bridge_pb2_grpc.BridgeServiceStub(channel)
        call = stub.ListModels.with_call(
            bridge_pb2.ListModelsRequest(), metadata=(("x-request-id", f"{SECRET} {SECRET}"),), timeout=60
        )[1]
        sent = dict(call.initial_metadata())["x-request-id"]
    assert len(sent) == 16 and SECRET not in trio["bridge"].log.read_text()
    with Client(trio["bridge"].address) as client, pytest.raises(CallError, match="request_id must be"):
        client.generate("The quick", request_id="two words")


@pytest.mark.parametrize("sent", ["", "a b", "ä", "x" * 65, 'a"b', "a\nb"])
def test_only_harmless_ids_are_taken(sent: str) -> None:
    assert read_request_id([("x-request-id", sent)]) != sent
    assert read_request_id([("other", "x"), ("x-request-id", "a.B_9:-")]) == "a.B_9:-"


@pytest.fixture
def restored() -> Iterator[None]:
    """Restores the root logger after a test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    token = request_id.set("")
    yield
    request_id.reset(token)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("bridge", "services"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("grpc._cython.cygrpc").filters.clear()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("format_", LogFormat)
@pytest.mark.parametrize(
    ("logger", "level", "id_", "shown"),
    [
        ("services.rpc.status", LogLevel.INFO, "job-1", False),
        ("services.rpc.status", LogLevel.DEBUG, "job-1", False),
        ("services.rpc.status", LogLevel.INFO, "", False),
        ("services.engines.scheduler", LogLevel.INFO, "job-1", True),
    ],
)
def test_a_traceback_does_not_quote_a_request(
    capsys: pytest.CaptureFixture[str], format_: LogFormat, logger: str, level: LogLevel, id_: str, shown: bool
) -> None:
    configure(format_, level)
    request_id.set(id_)
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"bad {SECRET}") from error
    except ValueError:
        logging.getLogger(logger).exception("it failed")
    text = capsys.readouterr().err
    assert "ValueError" in text and "KeyError" in text and "test_logs.py" in text and "it failed" in text
    # The line of this test's own source does not spell the text out.
    assert (SECRET in text) is shown
    assert (id_ in text) if id_ else ("request_id" not in text and "[" not in text.splitlines()[0])


@pytest.mark.usefixtures("restored")
def test_levels_are_those_of_our_own_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogFormat.TEXT, LogLevel.DEBUG)
    logging.getLogger("services.x").debug("ours")
    logging.getLogger("other").info("theirs")
    configure(LogFormat.TEXT, LogLevel.ERROR)
    logging.getLogger("services.x").warning("too little")
    assert capsys.readouterr().err == "DEBUG services.x: ours\n"


@pytest.mark.usefixtures("restored")
def test_a_client_that_leaves_while_it_is_sent_to_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogFormat.TEXT, LogLevel.WARNING)
    for error in (cygrpc.ExecuteBatchError("_send_message"), cygrpc.InternalError("a bug")):
        logging.getLogger("grpc._cython.cygrpc").error("raised in core", exc_info=error)
    assert capsys.readouterr().err.startswith("ERROR grpc._cython.cygrpc: raised in core\nInternalError")
