"""A synchronous and an asynchronous client of the bridge."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc

from draftbridge.errors import CallError
from draftbridge.messages import (
    Event,
    Generation,
    checked_id,
    checked_timeout,
    event_of,
    generate_request,
    invalid,
    translate_request,
)
from draftbridge.security import CHANNEL_OPTIONS, Credentials, is_address, open_aio_channel, open_channel
from draftbridge.tracing import CallTrace
from draftbridge.v1 import bridge_pb2, bridge_pb2_grpc, model_pb2

_GENERATE = "draftbridge.v1.BridgeService/Generate"
# For all calls but Generate, whose caller sets the limit.
_TIMEOUT_SECONDS = 30.0


def checked_address(address: str) -> str:
    """Returns the address. Raises `CallError` if it is not one."""
    if not is_address(address):
        raise invalid("address", f"the address must be HOST:PORT, with a port from 1 to 65535, got {address!r}")
    return address


def _check_open(closed: bool) -> None:
    if closed:
        text = "this client was closed: open another one, or close it after its last call"
        raise CallError(grpc.StatusCode.FAILED_PRECONDITION, "CLIENT_CLOSED", text, {})


@contextmanager
def _call_errors(client: "Client | AsyncClient") -> Iterator[None]:
    """Raises `CallError` for a call that fails, also because its client was closed."""
    try:
        yield
    except grpc.RpcError as error:
        _check_open(client._closed)
        raise CallError.from_rpc(error, client._address) from error
    except asyncio.CancelledError:
        # grpc.aio raises it for a call that `close` has cancelled, too, though the task itself is not cancelled.
        if (task := asyncio.current_task()) and not task.cancelling():
            _check_open(client._closed)
        raise


class Client:
    """Calls the bridge at `address`, HOST:PORT, by default without TLS and token. Use it as a context manager.

    Every method raises `CallError` if the call fails.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._channel = open_channel(checked_address(address), credentials, CHANNEL_OPTIONS)
        self._stub = bridge_pb2_grpc.BridgeServiceStub(self._channel)
        self._closed = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running calls and closes the channel."""
        self._closed = True
        self._channel.close()

    def stream(
        self, prompt: str | None = None, *, request_id: str = "", timeout: float | None = None, **options: Any
    ) -> Iterator[Event]:
        """Yields a GenerateStarted, any number of GenerateDelta, and a GenerateFinished as they arrive.

        Takes the options of `generate_request`. Closing the iterator early cancels the generation. `request_id` names
        the request in the logs of all services: 1 to 64 ASCII letters, digits and `_.:-`. GenerateStarted has it.
        `timeout`: seconds that the whole generation may take, by default any number.
        """
        _check_open(self._closed)
        limit = checked_timeout(timeout)
        request, trace = generate_request(prompt, **options), CallTrace(_GENERATE, checked_id(request_id))
        call, code = self._stub.Generate(request, timeout=limit, metadata=trace.metadata), ""
        try:
            with _call_errors(self):
                for response in call:
                    yield event_of(response)
        except CallError as failure:
            code = failure.code.name
            raise
        finally:
            call.cancel()
            trace.end(code)

    def generate(self, prompt: str | None = None, **options: Any) -> Generation:
        """Returns the complete generation. Takes the options of `stream`."""
        return Generation.of(self.stream(prompt, **options))

    def models(self) -> list[model_pb2.Model]:
        """Returns the models that the bridge can use."""
        return list(self._ask(self._stub.ListModels, bridge_pb2.ListModelsRequest()).models)

    def services(self) -> list[bridge_pb2.ServiceState]:
        """Returns the model services that the bridge is configured with, and their models, as it sees them now."""
        return list(self._ask(self._stub.ListModels, bridge_pb2.ListModelsRequest()).services)

    def pairs(self, workload: str = "") -> list[bridge_pb2.Pair]:
        """Returns the pairs of all models that the bridge knows, with what it expects for this kind of text."""
        return list(self._ask(self._stub.ListPairs, bridge_pb2.ListPairsRequest(workload=workload)).pairs)

    def status(self) -> bridge_pb2.GetStatusResponse:
        """Returns the state of the bridge and of its model services."""
        answer: bridge_pb2.GetStatusResponse = self._ask(self._stub.GetStatus, bridge_pb2.GetStatusRequest())
        return answer

    def translate(
        self, text: str | None = None, *, token_ids: Sequence[int] | None = None, source: str, target: str
    ) -> bridge_pb2.TranslateResponse:
        """Returns a text, or ids of the model `source`, in the tokens of `source` and of `target`."""
        request = translate_request(text, token_ids, source, target)
        answer: bridge_pb2.TranslateResponse = self._ask(self._stub.Translate, request)
        return answer

    def _ask(self, method: Any, request: Any) -> Any:
        _check_open(self._closed)
        with _call_errors(self):
            return method(request, timeout=_TIMEOUT_SECONDS)


class AsyncClient:
    """The asyncio counterpart of `Client`. Open it in the event loop that uses it."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._channel = open_aio_channel(checked_address(address), credentials, CHANNEL_OPTIONS)
        self._stub = bridge_pb2_grpc.BridgeServiceStub(self._channel)
        self._closed = False

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels running calls and closes the channel."""
        self._closed = True
        await self._channel.close()

    async def stream(
        self,
        prompt: str | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,  # noqa: ASYNC109  # gRPC's deadline, which the server knows too
        **options: Any,
    ) -> AsyncIterator[Event]:
        """See `Client.stream`."""
        _check_open(self._closed)
        limit = checked_timeout(timeout)
        request, trace = generate_request(prompt, **options), CallTrace(_GENERATE, checked_id(request_id))
        call, code = self._stub.Generate(request, timeout=limit, metadata=trace.metadata), ""
        try:
            with _call_errors(self):
                async for response in call:
                    yield event_of(response)
        except CallError as failure:
            code = failure.code.name
            raise
        finally:
            call.cancel()
            trace.end(code)

    async def generate(self, prompt: str | None = None, **options: Any) -> Generation:
        """See `Client.generate`."""
        return Generation.of([event async for event in self.stream(prompt, **options)])

    async def models(self) -> list[model_pb2.Model]:
        """See `Client.models`."""
        return list((await self._ask(self._stub.ListModels, bridge_pb2.ListModelsRequest())).models)

    async def services(self) -> list[bridge_pb2.ServiceState]:
        """See `Client.services`."""
        return list((await self._ask(self._stub.ListModels, bridge_pb2.ListModelsRequest())).services)

    async def pairs(self, workload: str = "") -> list[bridge_pb2.Pair]:
        """See `Client.pairs`."""
        request = bridge_pb2.ListPairsRequest(workload=workload)
        return list((await self._ask(self._stub.ListPairs, request)).pairs)

    async def status(self) -> bridge_pb2.GetStatusResponse:
        """See `Client.status`."""
        answer: bridge_pb2.GetStatusResponse = await self._ask(self._stub.GetStatus, bridge_pb2.GetStatusRequest())
        return answer

    async def translate(
        self, text: str | None = None, *, token_ids: Sequence[int] | None = None, source: str, target: str
    ) -> bridge_pb2.TranslateResponse:
        """See `Client.translate`."""
        request = translate_request(text, token_ids, source, target)
        answer: bridge_pb2.TranslateResponse = await self._ask(self._stub.Translate, request)
        return answer

    async def _ask(self, method: Any, request: Any) -> Any:
        _check_open(self._closed)
        with _call_errors(self):
            return await method(request, timeout=_TIMEOUT_SECONDS)
