"""DraftService: one stream, one session."""

from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation
from bridge.sampling.sampler import SamplingParameters
from draftbridge.v1 import draft_pb2, draft_pb2_grpc
from services.model.draft.credit import CreditedSession
from services.rpc import codec, limits
from services.rpc.streams import RoleServicer, check_model, first_message, listening

# A session for sampling parameters and a seed.
OpenSession = Callable[[SamplingParameters, int], CreditedSession]


class DraftServicer(RoleServicer[OpenSession], draft_pb2_grpc.DraftServiceServicer):
    """Drafts for anyone who opens a stream; see `RoleServicer`. gRPC asks for this method name."""

    role = "draft"

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """See the contract."""
        open_session = self.opener
        requests = aiter(request_iterator)
        opening = (await first_message(requests)).open
        check_model(opening.model, opening.tokenizer_sha256, self._model)
        sampling = limits.read_sampling(opening.sampling, self._model)
        with closing(open_session(sampling, opening.seed)) as session:

            async def hear(request: draft_pb2.DraftRequest) -> None:
                match request.WhichOneof("kind"):
                    case "sync":
                        await session.sync(limits.read_sync(request.sync, self._model))
                    case "grant":
                        await session.grant(request.grant.epoch, request.grant.credit)
                    case kind:
                        raise ProtocolViolation(f"{kind or 'nothing'} came in the middle of a stream: open only once")

            async for proposal in listening(requests, hear, session.no_more, session.proposals()):
                yield codec.write_proposal(proposal)
