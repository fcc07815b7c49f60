"""DraftService: one stream, one `DraftSession`."""

from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

from grpc import aio

from bridge.errors import ProtocolViolation, RoleNotServed
from draftbridge.v1 import draft_pb2, draft_pb2_grpc
from services import wire
from services.draft.session import DraftSession
from services.model.host import LoadedModel
from services.streams import check_model, first_message, listening


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Drafts for anyone who opens a stream, or refuses where the role is not served.

    gRPC asks for this method name.
    """

    def __init__(self, loaded: LoadedModel, serves: bool) -> None:
        self._loaded = loaded
        self._serves = serves

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """See the contract."""
        if not self._serves:
            raise RoleNotServed("this server", self._loaded.model.name, "draft")
        requests = aiter(request_iterator)
        opening = (await first_message(requests)).open
        check_model(opening.model, opening.tokenizer_sha256, self._loaded.model)
        sampler = self._loaded.sampler(wire.read_sampling(opening.sampling), opening.seed, confident=True)
        with closing(DraftSession(self._loaded.model, self._loaded.scheduler, sampler)) as session:

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
