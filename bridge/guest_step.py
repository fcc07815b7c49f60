"""The steps of a guest: what an engine reports of one of its forwards, and what the bridge answers."""

from dataclasses import dataclass, field

from bridge.sources.source import Offer


@dataclass(frozen=True)
class SequenceUpdate:
    """What one sequence has gained; see `ProposeSequence` in the contract."""

    id: int
    kept_token_count: int
    token_ids: tuple[int, ...]
    generated_token_count: int = 0
    max_candidate_count: int | None = None
    candidate_step: int = 0
    candidate_count: int = 0


@dataclass(frozen=True)
class StepUpdate:
    """What one forward of the engine has changed; see `ProposeStep` in the contract."""

    number: int
    sequences: tuple[SequenceUpdate, ...]
    ended: tuple[int, ...] = ()
    deadline_ns: int = 2_000_000
    engine_ns: int = 0
    forward_token_count: int = 0


@dataclass(frozen=True)
class Proposed:
    """Candidates that continue a sequence of `base` tokens, `width` of them for one forward."""

    sequence_id: int
    base: int
    offer: Offer
    width: int


@dataclass
class Answer:
    """The answer to a step. `unknown`: sequences to be sent from the beginning. `note`: why some get no candidates.

    `withdrawn`: sequences for which the candidates of earlier answers are not worth verifying any more.
    """

    number: int
    proposed: list[Proposed] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    note: str = ""
