"""Requests that go on as long as nobody reads their answers."""

import pytest

from draftbridge import client

# The answer is more than a connection with a small window holds.
UNREAD = {"max_tokens": 200, "ignore_eos": True, "logprobs": 100}
_SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]


def hold_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes clients that are opened from now on receive only a little that they have not read."""
    monkeypatch.setattr(client, "CHANNEL_OPTIONS", [*client.CHANNEL_OPTIONS, *_SMALL_WINDOW])
