"""No log contains what clients send."""

import contextlib
import logging
import sys
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from draftbridge import CallError, Client, Credentials
from draftbridge.candidates import SequenceStep
from services.cli.processes import launched
from services.logs import JsonFormatter, TextFormatter
from tests.support.guests import client as guest

PROMPT = "The quick brown fox"
MARKER = "xyzzy7391"


def test_nothing_that_clients_send_is_logged(tiny_models: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    module = "tests.support.debug_cli"
    common = ("--listen", "127.0.0.1:0", "--until-stdin-closes", "--log-level", "debug")
    options = (*common, "--dtype", "float32", "--threads", "1")
    with contextlib.ExitStack() as stack:
        target, draft = (
            stack.enter_context(launched(role, "serve", str(path), "--role", role, *options, module=module))[0]
            for role, path in zip(("target", "draft"), tiny_models, strict=True)
        )
        models = ("--target", target, "--draft", draft, "--ngram-memory", "1")
        address, _ = stack.enter_context(launched("bridge", "bridge", *models, *common, module=module))
        client = stack.enter_context(Client(address, Credentials(token=f"{MARKER}-token")))
        marked = {"max_tokens": 8, "stop": [MARKER], "tenant": MARKER}
        assert client.generate(f"{PROMPT} {MARKER}", **marked).token_ids
        client.generate(messages=[{"role": "user", "content": MARKER, "name": MARKER}], **marked)
        client.translate(MARKER, source="tiny-target", target="tiny-draft")
        for wrong in ({"target": MARKER}, {"draft": MARKER}, {"sources": [MARKER]}, {"max_tokens": 2**31}):
            with pytest.raises(CallError):
                client.generate(MARKER, **marked | wrong)
        with closing(guest(address, engine=f"an engine {MARKER}")) as engine:
            engine.step([SequenceStep(7391, [2**31])], deadline=5.0)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(f"/draftbridge.v1.BridgeService/{MARKER}")(MARKER.encode())
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/draftbridge.v1.ModelService/GetModel")(b"\xff" + MARKER.encode())
    logged = capfd.readouterr().err
    assert "DEBUG asyncio" in logged  # the level is DEBUG
    assert "some sequences of engine" in logged
    assert MARKER not in logged and "7391" not in logged


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_tracebacks_leave_out_what_an_exception_says(formatter: logging.Formatter) -> None:
    try:
        try:
            raise ExceptionGroup(MARKER, [KeyError(MARKER)])
        except ExceptionGroup as error:
            raise ValueError(f"no {MARKER}") from error
    except ValueError:
        raised = sys.exc_info()
    text = formatter.format(logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), raised))
    assert MARKER not in text
    assert all(name in text for name in ("ExceptionGroup", "KeyError", "ValueError", Path(__file__).name))
    message = f"never retrieved\nfuture: {MARKER}"
    text = formatter.format(logging.LogRecord("asyncio", logging.ERROR, "", 1, message, (), raised))
    assert "never retrieved" in text and MARKER not in text
