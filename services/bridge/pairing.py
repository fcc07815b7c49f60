"""Pairs targets with drafts: which pairs are possible, which draft a request gets, and which one replaces it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from bridge.errors import DraftAway, InvalidField, PairRefused, ProtocolViolation
from bridge.generation import Finished
from bridge.planning.choice import Candidate, DraftChoice, DraftChooser, Expectation, PairRecord, predicted_gain
from bridge.planning.costs import Ewma
from bridge.planning.planner import Mode
from bridge.request import Request
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import model_pb2
from services.bridge.endpoint import Endpoint
from services.bridge.zoo import Zoo

_MAX_WORKLOAD_LENGTH, _MAX_DRAFTS = 64, 64
# Assumed bytes of a target's token, until requests have shown them.
_PRIOR_TOKEN_BYTES = 4.0
_MAX_TARGETS = 1024


@dataclass(frozen=True)
class Wish:
    """The draft that a request asks for: names in order of preference, empty for any; and its kind of text."""

    drafts: tuple[str, ...] = ()
    workload: str = ""

    @classmethod
    def of(cls, draft: str, drafts: Sequence[str], workload: str) -> "Wish":
        """Returns the wish of a request that has both a name and a list. Raises `InvalidField` if both are given."""
        if draft and drafts:
            raise InvalidField("drafts", "empty if draft is given", ", ".join(drafts))
        return cls(tuple(drafts) or ((draft,) if draft else ()), workload)


@dataclass(frozen=True)
class PairState:
    """A pair as `ListPairs` shows it. `refusal`: why it is not used, or empty."""

    target: Endpoint
    draft: Endpoint
    refusal: str
    is_best: bool
    expected: Expectation
    bytes_per_second: float
    record: PairRecord
    vocabulary_overlap: float


class Assignment:
    """The drafts of one request: the present one, and those that may replace it. `note`: why it has no draft."""

    def __init__(self, pairing: "Pairing", target: Endpoint, drafts: Sequence[Endpoint], wish: Wish) -> None:
        self._pairing, self._target, self._wish = pairing, target, wish
        self._others = list(drafts)
        self.choice: DraftChoice | None = None
        self.draft = self._others.pop(0) if self._others else None
        self._replaced = False
        self.note = ""

    def next(self, error: Exception | None) -> Endpoint | None:
        """Returns the draft that replaces the present one, which failed with an error or gains nothing (None)."""
        if isinstance(error, ProtocolViolation) and self.draft:
            self._pairing.zoo.refuse(self.draft, f"it broke the contract: {error}")
        while self._others:
            other = self._others.pop(0)
            # A draft that gains nothing is replaced only by one that is expected to gain.
            if self._pairing.is_usable(self._target, other) and (error or self._pairing.is_faster(self._target, other)):
                self.draft, self._replaced = other, True
                return other
        return None

    def finished(self, event: Finished) -> None:
        """Learns from a request that ended. One that had several drafts does not show the gain of any."""
        single_ns = plain_pass_ns(self._target)
        self._pairing.observe_tokens(self._target, event)
        if not self.draft or self._replaced or event.mode is not Mode.AUTO or not single_ns:
            return
        statistics = event.statistics
        drafted = statistics.sources.get("draft")
        plans = statistics.plans.values()
        if drafted and plans:
            record = PairRecord(
                request_count=1.0,
                token_count=sum(one.token_count for one in plans),
                plain_passes=sum(one.elapsed_ns for one in plans) / single_ns,
                pass_count=sum(one.target_pass_count for one in plans),
                candidate_count=drafted.num_draft_tokens,
                accepted_count=drafted.num_accepted_tokens,
                accepted_byte_count=drafted.accepted_byte_count,
            )
            self._pairing.chooser.observe(key_of(self._target), key_of(self.draft), self._wish.workload, record)


class Pairing:
    """Knows all pairs of a zoo."""

    def __init__(self, zoo: Zoo, chooser: DraftChooser | None = None) -> None:
        self.zoo, self.chooser = zoo, chooser or DraftChooser()
        self._overlaps: dict[tuple[str, str], float] = {}
        self._token_bytes: LRUCache[str, Ewma] = LRUCache(_MAX_TARGETS)

    def assign(self, target: Endpoint, request: Request, wish: Wish) -> Assignment:
        """Returns the drafts for a request. Raises `ModelNotFound`, `DraftAway`, `PairRefused` or `InvalidField`."""
        if len(wish.workload) > _MAX_WORKLOAD_LENGTH or not wish.workload.isprintable():
            raise InvalidField("workload", f"at most {_MAX_WORKLOAD_LENGTH} printable characters", repr(wish.workload))
        if len(wish.drafts) > _MAX_DRAFTS:
            raise InvalidField("drafts", f"at most {_MAX_DRAFTS} names", len(wish.drafts))
        if request.speculation.mode is Mode.OFF:
            return Assignment(self, target, (), wish)
        if len(wish.drafts) == 1:
            draft = self.zoo.draft(wish.drafts[0])
            if draft and (refusal := self.refusal(target, draft)):
                raise PairRefused(target.model.name, draft.model.name, refusal)
            return Assignment(self, target, [draft] if draft else [], wish)
        if wish.drafts:
            assignment = Assignment(self, target, self._named(target, wish.drafts), wish)
        else:
            assignment = self._chosen(target, request, wish)
        if not assignment.draft:
            assignment.note = self.zoo.note_on_drafts or self._note_on_refusals(target)
        return assignment

    def _named(self, target: Endpoint, names: Sequence[str]) -> list[Endpoint]:
        found = []
        for name in dict.fromkeys(names):
            try:
                draft = self.zoo.draft(name) if name else None
            except DraftAway:
                continue
            if draft and not self.refusal(target, draft):
                found.append(draft)
        return found

    def _chosen(self, target: Endpoint, request: Request, wish: Wish) -> Assignment:
        drafts = {self.candidate(target, one): one for one in self.drafts_of(target)}
        if not drafts:
            return Assignment(self, target, (), wish)
        explore = request.speculation.mode is Mode.AUTO and request.speculation.allows("draft", takes_time=True)
        key, plain = key_of(target), self.plain_bytes_per_second(target)
        best, choice = self.chooser.choose(key, list(drafts), wish.workload, plain, explore=explore)
        ranked = sorted(
            (one for one in drafts if one is not best),
            key=lambda one: -self.chooser.expect(key, one, wish.workload).gain,
        )
        assignment = Assignment(self, target, [drafts[one] for one in (best, *ranked)], wish)
        assignment.choice = choice
        return assignment

    def _note_on_refusals(self, target: Endpoint) -> str:
        for draft in self.zoo.of_role(model_pb2.ROLE_DRAFT):
            if refusal := self.refusal(target, draft):
                return f"no draft can be paired with {target.model.name}: {refusal}; the target decoded alone"
        return ""

    def drafts_of(self, target: Endpoint) -> list[Endpoint]:
        """Returns the drafts that can be paired with a target, one for each name, in the order of the configuration."""
        by_name: dict[str, Endpoint] = {}
        for draft in self.zoo.of_role(model_pb2.ROLE_DRAFT):
            if not self.refusal(target, draft):
                by_name.setdefault(draft.model.name, draft)
        return list(by_name.values())

    def refusal(self, target: Endpoint, draft: Endpoint) -> str:
        """Returns why a target and a draft cannot be paired, or ""."""
        if [one.address for one in self.zoo.replicas(target)] == [draft.address]:
            return (
                f"the draft {draft.model.name} is the target's only replica ({draft.address}): its passes would take "
                "the target's time; start another server for one of them"
            )
        return ""

    def is_usable(self, target: Endpoint, draft: Endpoint) -> bool:
        """Returns whether a draft is still connected and can be paired."""
        return any(one is draft for one in self.zoo.endpoints) and not self.refusal(target, draft)

    def is_faster(self, target: Endpoint, draft: Endpoint) -> bool:
        """Returns whether a draft is expected to be faster than the target alone."""
        return self.chooser.expect(key_of(target), self.candidate(target, draft), "").gain > 1.0

    def candidate(self, target: Endpoint, draft: Endpoint) -> Candidate:
        """Returns a draft with the gain that follows from the models' reported times."""
        competes = draft.model.competes_with(target.model)
        prior = predicted_gain(target.model.forward_costs, draft.model.forward_costs, competes=competes)
        return Candidate(draft.model.name, key_of(draft), prior)

    def plain_bytes_per_second(self, target: Endpoint) -> float:
        """Returns the speed of the target alone under the present load; 0 if it is unknown."""
        single_ns, known = plain_pass_ns(target), self._token_bytes.get(key_of(target))
        return 1e9 * (known.value if known else _PRIOR_TOKEN_BYTES) / single_ns if single_ns else 0.0

    def observe_tokens(self, target: Endpoint, event: Finished) -> None:
        """Learns how many bytes a target's tokens have."""
        if event.generated_token_count:
            known = self._token_bytes.setdefault(key_of(target), Ewma(_PRIOR_TOKEN_BYTES))
            known.observe(event.generated_byte_count / event.generated_token_count)

    async def compare_vocabularies(self) -> None:
        """Computes the overlaps of all vocabularies if one is new, in a thread: two large ones take 0.03 s."""
        models = [one.known.model for one in self.zoo.connections if one.known]
        known = {one.vocabulary.sha256: one.vocabulary for one in models}
        if any((one, one) not in self._overlaps for one in known):
            self._overlaps = await asyncio.to_thread(_overlaps_of, list(known.values()))

    def states(self, workload: str) -> list[PairState]:
        """Returns all pairs of known models, in the order of the configuration; see `compare_vocabularies`."""
        drafts: dict[str, Endpoint] = {}
        problems: dict[str, str] = {}
        for one in self.zoo.connections:
            if one.known and one.role == model_pb2.ROLE_DRAFT:
                name, problem = one.known.model.name, one.problem or self.zoo.conflict(one)
                if name not in drafts or (problems[name] and not problem):
                    drafts[name], problems[name] = one.known, problem
        found = []
        targets = {one.model.name: one for one in reversed(self.zoo.of_role(model_pb2.ROLE_TARGET))}
        for target in reversed(targets.values()):
            key, plain = key_of(target), self.plain_bytes_per_second(target)
            candidates = {name: self.candidate(target, one) for name, one in drafts.items()}
            expected = {name: self.chooser.expect(key, one, workload) for name, one in candidates.items()}
            refusals = {name: problems[name] or self.refusal(target, one) for name, one in drafts.items()}
            usable = [name for name in drafts if not refusals[name]]
            best = max(usable, key=lambda name: expected[name].gain, default=None)
            for name, draft in drafts.items():
                gain = expected[name].gain
                record = self.chooser.record(key, candidates[name].key, workload)
                found.append(
                    PairState(
                        target,
                        draft,
                        refusals[name],
                        name == best,
                        expected[name],
                        gain * plain,
                        record,
                        self._overlaps.get(_vocabularies(target, draft), 0.0),
                    )
                )
        return found


def key_of(endpoint: Endpoint) -> str:
    """Identifies a model by everything that its speed and text depend on."""
    one = endpoint.description
    return "|".join((one.name, one.revision, one.engine, one.device, one.dtype, one.tokenizer_sha256[:12]))


def _vocabularies(target: Endpoint, draft: Endpoint) -> tuple[str, str]:
    return target.model.vocabulary.sha256, draft.model.vocabulary.sha256


def _overlaps_of(vocabularies: Sequence[Vocabulary]) -> dict[tuple[str, str], float]:
    """Returns the share of each draft's tokens that are tokens of each target, too, by their bytes.

    The keys are the checksums of a target and a draft. Only one vocabulary at a time is held as a set.
    """
    sizes: dict[str, int] = {}
    shared: dict[tuple[str, str], int] = {}
    for place, one in enumerate(vocabularies):
        tokens = {data for data in one.tokens if data}
        sizes[one.sha256] = shared[one.sha256, one.sha256] = len(tokens)
        for other in vocabularies[place + 1 :]:
            count = len(tokens.intersection(other.tokens))
            shared[one.sha256, other.sha256] = shared[other.sha256, one.sha256] = count
    return {(target, draft): count / max(sizes[draft], 1) for (target, draft), count in shared.items()}


def plain_pass_ns(target: Endpoint) -> float:
    """Returns the time of a plain pass under the present load; 0 if it is unknown."""
    return target.estimates.costs.single_ns
