"""What clients send is in no log."""

import contextlib
import sys
from pathlib import Path

import grpc
import pytest

from draftbridge import CallError, Client, Credentials
from services.cli.processes import launched

PROMPT = "The quick brown fox"
MARKER = "xyzzy7391"


def test_nothing_that_clients_send_is_logged(tiny_models: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    module = "tests.support.debug_cli"
    common = ("--listen", "127.0.0.1:0", "--until-stdin-closes")
    options = (*common, "--dtype", "float32", "--threads", "1")
    with contextlib.ExitStack() as stack:
        target, draft = (
            stack.enter_context(launched(role, "serve", str(path), "--role", role, *options, module=module))[0]
            for role, path in zip(("target", "draft"), tiny_models, strict=True)
        )
        models = ("--target", target, "--draft", draft, "--suffix-memory", "1")
        address, _ = stack.enter_context(launched("bridge", "bridge", *models, *common, module=module))
        client = stack.enter_context(Client(address, Credentials(token=f"{MARKER}-token")))
        said = {"max_tokens": 8, "stop": [MARKER], "tenant": MARKER}
        assert client.generate(f"{PROMPT} {MARKER}", **said).token_ids
        client.generate(messages=[{"role": "user", "content": MARKER, "name": MARKER}], **said)
        client.translate(MARKER, source="tiny-target", target="tiny-draft")
        for wrong in ({"target": MARKER}, {"draft": MARKER}, {"sources": [MARKER]}, {"max_tokens": 2**31}):
            with pytest.raises(CallError):
                client.generate(MARKER, **said | wrong)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(f"/draftbridge.v1.BridgeService/{MARKER}")(MARKER.encode())
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/draftbridge.v1.ModelService/GetModel")(b"\xff" + MARKER.encode())
    logged = capfd.readouterr().err
    assert "DEBUG asyncio" in logged  # the level is DEBUG
    assert MARKER not in logged


def test_tracebacks_leave_out_what_an_exception_says() -> None:
    import logging

    from services.discreet import DiscreetFormatter

    try:
        try:
            raise KeyError(MARKER)
        except KeyError as error:
            raise ValueError(f"no {MARKER}") from error
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    text = DiscreetFormatter("%(message)s").format(record)
    assert MARKER not in text.replace("raise KeyError(MARKER)", "")
    assert "KeyError" in text and "ValueError" in text and "test_discretion.py" in text
    record = logging.LogRecord(
        "asyncio", logging.ERROR, "", 1, f"never retrieved\nfuture: {MARKER}", (), record.exc_info
    )
    assert f"future: {MARKER}" not in DiscreetFormatter("%(message)s").format(record)
