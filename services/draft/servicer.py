"""DraftService: one stream, one session."""

from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation, RoleNotServed
from bridge.models import Model
from bridge.sampling import SamplingParameters
from draftbridge.v1 import draft_pb2, draft_pb2_grpc
from services import wire
from services.draft.credit import CreditedSession
from services.streams import check_model, first_message, listening

# A session for sampling parameters and a seed.
OpenSession = Callable[[SamplingParameters, int], CreditedSession]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Drafts for anyone who opens a stream, or refuses where the role is not served: without `open_session`.

    gRPC asks for this method name.
    """

    def __init__(self, model: Model, open_session: OpenSession | None) -> None:
        self._model = model
        self._open_session = open_session

    @property
    def serves(self) -> bool:
        """Whether the role is served."""
        return self._open_session is not None

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """See the contract."""
        if self._open_session is None:
            raise RoleNotServed("this server", self._model.name, "draft")
        requests = aiter(request_iterator)
        opening = (await first_message(requests)).open
        check_model(opening.model, opening.tokenizer_sha256, self._model)
        with closing(self._open_session(wire.read_sampling(opening.sampling), opening.seed)) as session:

            async def hear(request: draft_pb2.DraftRequest) -> None:
                match request.WhichOneof("kind"):
                    case "sync":
                        await session.sync(wire.read_sync(request.sync))
                    case "grant":
                        await session.grant(request.grant.epoch, request.grant.credit)
                    case kind:
                        raise ProtocolViolation(f"{kind or 'nothing'} came in the middle of a stream: open only once")

            async for proposal in listening(requests, hear, session.no_more, session.proposals()):
                yield wire.write_proposal(proposal)
