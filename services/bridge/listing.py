"""Converts services and pairs to the messages of `ListModels` and `ListPairs`, and those of `GetStatus` to states."""

from collections.abc import Sequence

from bridge.measuring.costs import MAX_WIDTH
from draftbridge.v1 import bridge_pb2, model_pb2
from services.bridge.backend import ServiceState
from services.bridge.connection import Connection, State
from services.bridge.endpoint import Endpoint
from services.bridge.pairing import PairState

_STATES = {
    State.CONNECTING: bridge_pb2.ServiceState.STATE_CONNECTING,
    State.AVAILABLE: bridge_pb2.ServiceState.STATE_AVAILABLE,
    State.AWAY: bridge_pb2.ServiceState.STATE_AWAY,
    State.REFUSED: bridge_pb2.ServiceState.STATE_REFUSED,
}
# Numbers of tokens whose passes `ListModels` reports.
_WIDTHS = (1, 2, 4, 8, 16, MAX_WIDTH)


def write_service(connection: Connection, conflict: str) -> bridge_pb2.ServiceState:
    """Returns the state of a configured service. `conflict`: why it cannot be used beside the others, or empty."""
    known = connection.known
    return bridge_pb2.ServiceState(
        address=connection.address,
        role=connection.role,
        state=bridge_pb2.ServiceState.STATE_REFUSED if conflict else _STATES[connection.state],
        problem=connection.problem or conflict,
        model=connection.description,
        round_trip_ns=connection.round_trip_ns,
        measured_costs=_measured(known) if known and known.role == model_pb2.ROLE_TARGET else (),
    )


def _measured(target: Endpoint) -> list[model_pb2.ForwardCost]:
    costs = target.estimates.costs
    if not costs.single_ns:
        return []
    return [
        model_pb2.ForwardCost(token_count=width, forward_ns=int(costs.single_ns * costs.widths.of(width)))
        for width in _WIDTHS
    ]


def read_states(endpoints: Sequence[bridge_pb2.Endpoint]) -> list[ServiceState]:
    """Returns the states of all configured services.

    A target is missed if no service of its model can be used. One that has never answered may be a replica of any
    model, so it is missed only if no target can be used.
    """
    usable = {one.model for one in endpoints if one.role == model_pb2.ROLE_TARGET and one.reachable}

    def is_missed(one: bridge_pb2.Endpoint) -> bool:
        return one.role == model_pb2.ROLE_TARGET and one.model not in usable and bool(one.model or not usable)

    return [ServiceState(one.address, one.problem, is_missed(one)) for one in endpoints]


def write_pair(state: PairState) -> bridge_pb2.Pair:
    """Returns a pair with what is expected of it."""
    target, draft = state.target.model, state.draft.model
    return bridge_pb2.Pair(
        target=target.name,
        draft=draft.name,
        same_tokenizer=target.vocabulary.sha256 == draft.vocabulary.sha256,
        refusal=state.refusal,
        is_best=state.is_best,
        request_count=state.record.request_count,
        acceptance_rate=state.record.acceptance_rate,
        accepted_bytes_per_pass=state.record.accepted_bytes_per_pass,
        expected_gain=state.expected.gain,
        expected_bytes_per_second=state.bytes_per_second,
        vocabulary_overlap=state.vocabulary_overlap,
    )
