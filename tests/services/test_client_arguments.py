"""What a client cannot send is refused by the name of the argument, before any call."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from draftbridge import AsyncClient, Client, Credentials
from draftbridge.errors import CallError
from draftbridge.guests.client import open_client
from draftbridge.guests.transformers import assist
from draftbridge.messages import generate_request
from draftbridge.v1 import model_pb2

CHAT = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": 5}, "prompt"),
        ({"stop": [1]}, "stop"),
        ({"draft": ["a"]}, "draft"),
        ({"drafts": [1]}, "drafts"),
        ({"sources": 3}, "sources"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"draft_temperature": "x"}, "draft_temperature"),
        ({"regex": 5}, "regex"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"prompt": None, "token_ids": 5}, "token_ids"),
        ({"choice": [1]}, "choice"),
        ({"json_schema": {"const": {1}}}, "json_schema"),
        ({"prompt": None, "messages": [CHAT], "template_variables": {"x": {1}}}, "template_variables"),
        ({"prompt": None, "token_ids": np.array([1, 2]), "temperature": "warm"}, "temperature"),
    ],
)
def test_a_wrong_type_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(CallError, match=f"^{field} ") as caught:
        generate_request(**{"prompt": "a"} | arguments)
    assert (caught.value.reason, caught.value.metadata) == ("INVALID_FIELD", {"field": field})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"stop": "\ud800"}, "stop"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": ["a", "\ud800"]}, "choice"),
        ({"tenant": "\ud800"}, "tenant"),
        ({"prompt": None, "messages": [CHAT, CHAT | {"content": "\ud800"}]}, "messages[1]"),
        ({"prompt": None, "messages": [CHAT], "template_variables": {"x": "\ud800"}}, "template_variables"),
    ],
)
def test_a_text_that_is_not_utf_8_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(CallError, match="not valid UTF-8, or has lone surrogates") as caught:
        generate_request(**{"prompt": "a"} | arguments)
    assert (caught.value.reason, caught.value.metadata) == ("INVALID_FIELD", {"field": field})


@pytest.mark.parametrize("value", [{1}, float("nan"), "\ud800"])
def test_what_is_not_json_is_not_sent(value: Any) -> None:
    for sent in ({"messages": [CHAT | {"x": value}]}, {"messages": [CHAT], "template_variables": {"x": [value]}}):
        with pytest.raises(CallError, match=r"^(messages\[0\]|template_variables) "):
            generate_request(**sent)


def test_a_message_has_no_text_only_beside_its_tool_calls() -> None:
    request = generate_request(messages=[CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}])
    assert [message.content for message in request.chat.messages] == ["a", ""]


@pytest.mark.parametrize(
    "message",
    ["hi", {"role": "user"}, {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": None}],
)
def test_a_message_of_another_form_is_named_by_its_place(message: Any) -> None:
    with pytest.raises(CallError, match=r"^messages\[1\] must be a mapping") as caught:
        generate_request(messages=[CHAT, message])
    assert (caught.value.reason, caught.value.metadata) == ("INVALID_FIELD", {"field": "messages[1]"})


@pytest.mark.parametrize("seconds", ["5", float("nan")])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(seconds: Any) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(CallError, match=r"^timeout must be") as caught:
        client.generate("a", timeout=seconds)
    assert caught.value.metadata == {"field": "timeout"}
    async with AsyncClient("127.0.0.1:1") as client_of_loop:
        with pytest.raises(CallError, match=r"^timeout must be"):
            await client_of_loop.generate("a", timeout=seconds)


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_a_timeout_beyond_what_grpc_counts_is_no_limit(client: Client, seconds: float) -> None:
    assert client.generate("a", max_tokens=1, timeout=seconds).token_ids


def test_bytes_of_a_command_line_that_are_not_utf_8_are_called_that() -> None:
    with pytest.raises(CallError, match="not valid UTF-8, or has lone surrogates") as caught:
        generate_request(b"caf\xe9".decode(errors="surrogateescape"))
    assert caught.value.metadata == {"field": "prompt"}


def test_one_string_stands_for_a_list_of_it() -> None:
    request = generate_request("a", stop="ab", choice="yes", sources="suffix", drafts="small")
    assert list(request.stop) == ["ab"] and list(request.sampling.choice.texts) == ["yes"]
    assert list(request.speculation.sources) == ["suffix"] and list(request.drafts) == ["small"]


@pytest.mark.parametrize(
    "address", [None, 5, "", "localhost", "http://127.0.0.1:80", "127.0.0.1:99999", "a:0", "\udcff:1"]
)
def test_what_is_no_address_is_refused(address: Any) -> None:
    with pytest.raises(CallError, match="must be HOST:PORT"):
        Client(address)


async def test_a_client_that_was_closed_is_not_called() -> None:
    client, other = Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")
    client.close()
    await other.close()
    found = []
    for call in (lambda: client.generate("a"), client.models, lambda: list(client.stream("a"))):
        with pytest.raises(CallError, match="was closed: open another one") as caught:
            call()
        found.append(caught.value.reason)
    for waiting in (other.generate("a"), other.models()):
        with pytest.raises(CallError, match="was closed: open another one") as caught:
            await waiting
        found.append(caught.value.reason)
    assert set(found) == {"CLIENT_CLOSED"}


def test_an_adapter_is_not_opened_with_wrong_settings() -> None:
    for address in ("LOCAL", "http://127.0.0.1:80", "127.0.0.1:99999"):
        with pytest.raises(ValueError, match='HOST:PORT or "local"'):
            open_client(address, model_pb2.Model(), b"")
    for missing in (Credentials(ca=Path("missing")), Credentials(token_file=Path("missing"))):
        with pytest.raises(ValueError, match="missing"):
            open_client("127.0.0.1:1", model_pb2.Model(), b"", credentials=missing)
    with pytest.raises(ValueError, match="deadline"):
        assist(None, None, "local", deadline=-1.0)


def failed(code: grpc.StatusCode, answered: bool) -> str:
    class Failure(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return code

        def details(self) -> str:
            return "Socket closed"

        def initial_metadata(self) -> Any:
            return (("x-request-id", "7"),) if answered else ()

        def trailing_metadata(self) -> Any:
            return ()

    return str(CallError.from_rpc(Failure(), "here:1"))


@pytest.mark.parametrize("answered", [False, True])
def test_a_deadline_is_not_taken_for_a_wrong_address(answered: bool) -> None:
    text = failed(grpc.StatusCode.DEADLINE_EXCEEDED, answered)
    assert "came in time: give a longer timeout, or" in text
    assert ("fewer tokens" in text) == answered and ("TLS" in text) == (not answered)


def test_an_answer_that_breaks_off_is_not_taken_for_a_wrong_address() -> None:
    assert "check the address" in failed(grpc.StatusCode.UNAVAILABLE, answered=False)
    text = failed(grpc.StatusCode.UNAVAILABLE, answered=True)
    assert "broke off its answer" in text and "address" not in text


@pytest.mark.parametrize("answered", [False, True])
def test_a_call_that_reaches_a_bridge_as_it_stops_was_not_cancelled_by_the_client(answered: bool) -> None:
    assert "try again when it answers" in failed(grpc.StatusCode.CANCELLED, answered)
