"""Opens what an adapter asks for candidates: a bridge, or the same algorithm in the engine's own process."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from draftbridge.candidates import (
    DEFAULT_DEADLINE_SECONDS,
    CandidateClient,
    CandidateCounts,
    Candidates,
    SequenceStep,
)
from draftbridge.errors import CallError
from draftbridge.security import Credentials, is_address
from draftbridge.v1 import model_pb2

# The address for candidates without a bridge.
LOCAL = "local"


class Client(Protocol):
    """What an adapter uses; see `CandidateClient`."""

    counts: CandidateCounts

    def connect(self, timeout: float) -> bool: ...

    @property
    def connected(self) -> bool: ...

    def step(
        self,
        sequences: Sequence[SequenceStep],
        *,
        ended: Iterable[int] = (),
        deadline: float = DEFAULT_DEADLINE_SECONDS,
        engine_seconds: float | None = None,
        forward_token_count: int = 0,
    ) -> dict[int, Candidates]: ...

    def close(self) -> None: ...


def open_client(
    address: str,
    model: model_pb2.Model,
    tokenizer_json: bytes,
    *,
    engine: str = "",
    draft: str = "",
    sources: Sequence[str] = (),
    credentials: Credentials | None = None,
) -> Client:
    """Returns a client for the bridge at `address`, HOST:PORT, with the parameters of `CandidateClient`.

    The address "local" needs no bridge: candidates come from what repeats in the engine's own texts. Raises
    `ValueError` if that is asked for a draft, for an address that is none, and for credentials that cannot be used.
    """
    if address != LOCAL:
        if not is_address(address):
            raise ValueError(f'DraftBridge\'s bridge must be HOST:PORT or "{LOCAL}", got {address!r}')
        if credentials:
            try:
                credentials.check(address)
            except CallError as error:
                raise ValueError(str(error)) from error
        return CandidateClient(
            address, model, tokenizer_json, engine=engine, draft=draft, sources=sources, credentials=credentials
        )
    if draft or "draft" in sources:
        raise ValueError(f'DraftBridge has no draft without a bridge: give the HOST:PORT of one instead of "{LOCAL}"')
    from services.guests.local import LocalCandidates  # the algorithm, which no other client needs

    return LocalCandidates(model, tokenizer_json, sources)
