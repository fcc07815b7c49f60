"""Provides keys and a model server that starts fast, for tests of security."""

import contextlib
import hashlib
from collections.abc import Iterator

from draftbridge import Credentials
from draftbridge.security import open_channel
from draftbridge.v1 import model_pb2, model_pb2_grpc
from services.cli.processes import serve

ALICE, BOB, OLD, MODEST = (f"{name}-token-0123456789" for name in ("alice", "bob", "old", "modest"))
KEYS = f"""
[alice]
token = "{ALICE}"

[bob]
token-sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
concurrent-requests = 1

[old]
token = "{OLD}"
expires = 2020-01-01T00:00:00Z

[modest]
token = "{MODEST}"
tokens-per-minute = 10
"""


def describe(address: str, credentials: Credentials) -> model_pb2.Model:
    """Returns a model server's description of its model."""
    with open_channel(address, credentials, ()) as channel:
        return model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=60).model


@contextlib.contextmanager
def suffix_server(*options: str) -> Iterator[str]:
    """Runs a model server that starts fast. Yields its address."""
    with serve("suffix", "--role", "draft", *options) as (address, _):
        yield address
