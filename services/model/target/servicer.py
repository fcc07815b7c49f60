"""Implements TargetService; each stream has one `TargetSession`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation
from bridge.sampling.sampler import SamplingParameters
from draftbridge.v1 import target_pb2, target_pb2_grpc
from services.model.target.session import TargetSession
from services.rpc import codec, limits
from services.rpc.streams import RoleServicer, exchange

# Opens a session, given sampling parameters, a seed and the number of log probabilities to report, if any.
OpenSession = Callable[[SamplingParameters, int, int | None], Awaitable[TargetSession]]


class TargetServicer(RoleServicer[OpenSession], target_pb2_grpc.TargetServiceServicer):
    """Serves one target; see `RoleServicer`. gRPC prescribes the method name."""

    role = "target"

    async def Verify(  # noqa: N802
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """See the contract."""
        open_session = self.opener
        requests = aiter(request_iterator)
        opening, sampling = await self.read_opening(requests)
        with closing(await open_session(sampling, opening.seed, limits.read_logprobs(opening))) as session:

            async def on_request(request: target_pb2.VerifyRequest) -> None:
                match request.WhichOneof("kind"):
                    case "run":
                        await session.run(limits.read_run(request.run, self._model))
                    case "candidates":
                        await session.candidates(limits.read_candidates(request.candidates, self._model))
                    case "grant":
                        await session.grant(limits.read_grant(request.grant))
                    case kind:
                        raise ProtocolViolation(f"got {kind or 'no kind'} after open: send run, candidates or grant")

            async for result in exchange(requests, on_request, session.on_end_of_requests, session.passes()):
                yield codec.write_pass(result)
