"""Pairs targets with drafts: which pairs are possible, which draft a request gets, and which one replaces it."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import grpc
from cachetools import LRUCache

from bridge.errors import DraftBridgeError, InvalidField, ProtocolViolation, Unreachable
from bridge.generation import Finished
from bridge.measuring.costs import Ewma
from bridge.planning.planner import Mode
from bridge.request import Request
from bridge.sources.source import DRAFT
from bridge.statistics import DraftChoice, SourceStatistics, Statistics
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import model_pb2
from services.bridge.draft_choice import Candidate, DraftChooser, Expectation, PairRecord, predicted_gain
from services.bridge.endpoint import Endpoint, key_of
from services.bridge.pauses import Pauses
from services.bridge.replicas import Balancer, is_broken, is_of_replica
from services.bridge.zoo import Zoo
from services.errors import DraftAway, ModelNotFound, PairRefused
from services.rpc.status import RemoteError, code_of

_MAX_WORKLOAD_LENGTH, _MAX_DRAFTS = 64, 64
# Assumed bytes of a target's token, until requests have shown them.
_PRIOR_TOKEN_BYTES = 4.0
_MAX_TARGETS = 1024
_NO_DRAFT = "the request asks for a draft, and this bridge has none: start it with --draft HOST:PORT"


@dataclass(frozen=True)
class Wish:
    """What a request asks for: `draft`, this one or an error, or `drafts`, by preference; and its kind of text.

    Both are empty for any draft.
    """

    drafts: tuple[str, ...] = ()
    workload: str = ""
    draft: str = ""

    @classmethod
    def of(cls, draft: str, drafts: Sequence[str], workload: str) -> "Wish":
        """Returns the wish of a request that has both a name and a list. Raises `InvalidField` if both are given."""
        if draft and drafts:
            raise InvalidField("drafts", "empty if draft is given", ", ".join(drafts))
        return cls(tuple(drafts), workload, draft)


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
    """The drafts of one request: the present one, and those that may replace it. `note`: why it has no draft.

    `others`: the drafts that were not tried yet, by preference. `statistics`: those of the request, from which each of
    its drafts is judged if `learns`. `prompt`: what `blocks_of` returns, by which replicas are chosen.
    """

    def __init__(self, pairing: "Pairing", target: Endpoint, drafts: Sequence[Endpoint], wish: Wish) -> None:
        self._pairing, self._target, self._wish = pairing, target, wish
        self.others = list(drafts)
        self.choice: DraftChoice | None = None
        self.statistics, self.learns = Statistics(), False
        self.prompt: Sequence[bytes] = ()
        # The draft that takes part, and one that is being opened, each with its replica.
        self._present: tuple[Endpoint, Endpoint] | None = None
        self._opening: tuple[Endpoint, Endpoint] | None = None
        self._failed: set[str] = set()
        # What the request had shown when the present draft took over, and the drafts that it was counted for.
        self._before, self._counted = PairRecord(), set[str]()
        self.note = ""

    def replicas(self, draft: Endpoint) -> list[Endpoint]:
        """Returns the replicas of a draft that this request may use."""
        return [one for one in self._pairing.replicas(self._target, draft) if one.address not in self._failed]

    def next(self, error: DraftBridgeError | None) -> Endpoint | None:
        """Returns the replica of a draft that is to be opened now, or None.

        `error`: that of the replica that was to be opened before or, if that has taken over, of the present one. It is
        None for the first draft, and if the present one gains nothing. A replica that is lost, broken or full is
        replaced by another one of the same draft first.
        """
        failed, self._opening = self._opening or self._present, None
        other = None
        if error and failed:
            if failed is self._present:
                self._learn()
                self._present = None
            other = self._on_failure(*failed, error)
        if other := other or self._other():
            self._opening = other, self._pairing.balancer.choose(self.replicas(other), self.prompt, self)
        return self._opening and self._opening[1]

    def take_over(self) -> None:
        """Records that the draft that was opened last takes part from now on, in place of the present one."""
        self._learn()
        self._present, self._opening = self._opening, None

    def _other(self) -> Endpoint | None:
        for one in self.others:
            if not self.replicas(one):
                if not self.statistics.drafts:
                    self.note = f"the draft {one.model.name} was lost before the text began ({Unreachable.reason})"
            # A draft that gains nothing is replaced only by one that is expected to gain.
            elif self._present is None or self._pairing.is_faster(self._target, one, self._wish.workload):
                self.others.remove(one)
                return one
        return None

    def _on_failure(self, draft: Endpoint, replica: Endpoint, error: DraftBridgeError) -> Endpoint | None:
        """Avoids a replica. Returns its draft if that has another replica; otherwise the draft pauses."""
        self._failed.add(replica.address)
        # One that is no longer configured has been forgotten with its last stream: nothing would forget it again.
        configured = any(one.address == replica.address for one in self._pairing.zoo.connections)
        if is_broken(error) and configured:  # the stream of one that hangs reports no error
            self._pairing.balancer.on_failure(replica, self)
        # Other errors, such as those of the draft's template, arise here, and would with every replica.
        of_replica = isinstance(error, RemoteError) and is_of_replica(error)
        if (of_replica or isinstance(error, ProtocolViolation | Unreachable)) and self.replicas(draft):
            return draft
        # Other requests may have prompts, chats and grammars that the draft takes.
        if error.reason == ProtocolViolation.reason or code_of(error) is not grpc.StatusCode.INVALID_ARGUMENT:
            self._pairing.pauses.failed(self._target, draft)
        return None

    def finished(self, event: Finished) -> None:
        """Learns from a request that ended."""
        self._pairing.observe_tokens(self._target, event)
        self._learn()

    def _learn(self) -> None:
        """Records what the request has shown about the present draft, by the passes made since it took over."""
        total = _shown(self.statistics)
        shown = PairRecord(*(new - old for new, old in zip(astuple(total), astuple(self._before), strict=True)))
        self._before = total
        if self._present is None:
            return
        draft, pairing = self._present[0], self._pairing
        if shown.candidate_count:
            pairing.pauses.worked(self._target, draft)
        if self.learns and shown.plain_passes > 0:
            key = key_of(draft)
            shown = replace(shown, request_count=float(key not in self._counted))
            self._counted.add(key)
            pairing.chooser.observe(key_of(self._target), key, self._wish.workload, shown)


def _shown(statistics: Statistics) -> PairRecord:
    """Returns what a request has shown about its drafts so far."""
    drafted = statistics.sources.get(DRAFT) or SourceStatistics(DRAFT)
    return PairRecord(
        **vars(statistics.draft_passes),
        candidate_count=drafted.num_draft_tokens,
        accepted_count=drafted.num_accepted_tokens,
        accepted_byte_count=drafted.accepted_byte_count,
    )


def _learns(request: Request) -> bool:
    """Returns whether a request shows how good its drafts are, which take no part if their source is not allowed."""
    return request.speculation.mode is Mode.AUTO and request.speculation.allows(DRAFT)


class Pairing:
    """Knows all pairs of a zoo. `balancer`: that of the drafts' replicas."""

    def __init__(self, zoo: Zoo, chooser: DraftChooser | None = None) -> None:
        self.zoo, self.chooser = zoo, chooser or DraftChooser()
        self.pauses, self.balancer = Pauses(), Balancer()
        self._overlaps: dict[tuple[str, str], float] = {}
        self._token_bytes: LRUCache[str, Ewma] = LRUCache(_MAX_TARGETS)

    def assign(self, target: Endpoint, request: Request, wish: Wish) -> Assignment:
        """Returns the drafts for a request. Raises `ModelNotFound`, `DraftAway`, `PairRefused` or `InvalidField`."""
        if len(wish.workload) > _MAX_WORKLOAD_LENGTH or not wish.workload.isprintable():
            got = repr(wish.workload[: _MAX_WORKLOAD_LENGTH + 1])
            raise InvalidField("workload", f"at most {_MAX_WORKLOAD_LENGTH} printable characters", got)
        if len(wish.drafts) > _MAX_DRAFTS:
            raise InvalidField("drafts", f"at most {_MAX_DRAFTS} names", len(wish.drafts))
        unused = not (request.speculation.allows(DRAFT) or wish.draft or wish.drafts)
        if unused or request.speculation.mode is Mode.OFF:
            return Assignment(self, target, (), wish)
        assignment = self._assigned(target, request, wish)
        assignment.learns = _learns(request)
        return assignment

    def _assigned(self, target: Endpoint, request: Request, wish: Wish) -> Assignment:
        if wish.draft:
            draft = self.zoo.draft(wish.draft)
            assert draft, "a named draft is found, or an error raised"
            if refusal := self.refusal(target, draft):
                raise PairRefused(target.model.name, draft.model.name, refusal)
            return Assignment(self, target, [draft], wish)
        if wish.drafts:
            return self._named(target, wish)
        assignment = self._chosen(target, request, wish)
        if not assignment.others:
            given = request.speculation
            asked = DRAFT in given.sources or given.mode in (Mode.LOCKSTEP, Mode.OPPORTUNISTIC)
            none = _NO_DRAFT if asked else ""
            assignment.note = self.zoo.note_on_drafts or self._note_on_refusals(target) or none
        return assignment

    def _named(self, target: Endpoint, wish: Wish) -> Assignment:
        found: list[Endpoint] = []
        reasons, unknown = [], []
        names = list(dict.fromkeys(filter(None, wish.drafts)))
        for name in names:
            try:
                draft = self.zoo.draft(name)
            except (DraftAway, ModelNotFound) as error:
                reasons.append(str(error))
                unknown += [error] if isinstance(error, ModelNotFound) else []
                continue
            assert draft, "a named draft is found, or an error raised"
            if refusal := self.refusal(target, draft):
                reasons.append(refusal)
            else:
                found.append(draft)
        if unknown and len(unknown) == len(names):  # probably a mistake
            raise unknown[0]
        assignment = Assignment(self, target, found, wish)
        if not found and reasons:
            assignment.note = f"no draft of the list can be used ({'; '.join(reasons)}); the target decoded alone"
        return assignment

    def _chosen(self, target: Endpoint, request: Request, wish: Wish) -> Assignment:
        usable = self.drafts_of(target)
        paused = [one for one in usable if self.pauses.holds(target, one)]
        ready = [one for one in usable if one not in paused] or paused
        drafts = {self.candidate(target, one): one for one in ready}
        if not drafts:
            return Assignment(self, target, (), wish)
        key, plain = key_of(target), self.plain_bytes_per_second(target)
        best, choice = self.chooser.choose(key, list(drafts), wish.workload, plain, explore=_learns(request))
        ranked = sorted(
            (one for one in drafts if one is not best),
            key=lambda one: -self.chooser.expect(key, one, wish.workload).gain,
        )
        last = [one for one in paused if one not in ready]
        assignment = Assignment(self, target, [drafts[best], *(drafts[one] for one in ranked), *last], wish)
        assignment.choice = choice
        return assignment

    def _note_on_refusals(self, target: Endpoint) -> str:
        for draft in self.zoo.of_role(model_pb2.ROLE_DRAFT):
            if refusal := self.refusal(target, draft):
                return f"no draft can be paired with {target.model.name}: {refusal}; the target decoded alone"
        return ""

    def drafts_of(self, target: Endpoint) -> list[Endpoint]:
        """Returns the drafts that can be paired with a target, one for each name, in the order of the configuration."""
        able = {one.identity for one in self._beside(target)}
        by_name: dict[str, Endpoint] = {}
        for draft in self.zoo.of_role(model_pb2.ROLE_DRAFT):
            if draft.identity in able:
                by_name.setdefault(draft.model.name, draft)
        return list(by_name.values())

    def replicas(self, target: Endpoint, draft: Endpoint) -> list[Endpoint]:
        """Returns the usable replicas of a draft that can be paired with a target."""
        return [one for one in self._beside(target) if one.identity == draft.identity]

    def refusal(self, target: Endpoint, draft: Endpoint) -> str:
        """Returns why a target and a usable draft cannot be paired, or ""."""
        if self.replicas(target, draft):
            return ""
        return (
            f"the draft {draft.model.name} is the target's only replica ({draft.address}): its passes would take "
            "the target's time; start another server for one of them"
        )

    def _beside(self, target: Endpoint) -> list[Endpoint]:
        """Returns the usable services of drafts that are not the target's only replica."""
        targets, drafts = self.zoo.replicas(target), self.zoo.of_role(model_pb2.ROLE_DRAFT)
        return [one for one in drafts if not all(_same_server(other, one) for other in targets)]

    def is_faster(self, target: Endpoint, draft: Endpoint, workload: str) -> bool:
        """Returns whether a draft may be faster than the target alone: one without times and requests may be, too."""
        expected = self.chooser.expect(key_of(target), self.candidate(target, draft), workload)
        return expected.gain > 1.0 or not (expected.request_count or draft.model.forward_costs)

    def candidate(self, target: Endpoint, draft: Endpoint) -> Candidate:
        """Returns a draft with the gain that follows from the models' reported times."""
        competes = draft.model.competes_with(target.model)
        prior = predicted_gain(target.model.forward_costs, draft.model.forward_costs, competes=competes)
        return Candidate(draft.model.name, key_of(draft), prior)

    def plain_bytes_per_second(self, target: Endpoint) -> float:
        """Returns the speed of the target alone under the present load; 0 if it is unknown."""
        single_ns, known = target.estimates.costs.single_ns, self._token_bytes.get(key_of(target))
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

    def states(self, workload: str) -> Iterator[PairState]:
        """Yields all pairs of known models, in the order of the configuration; see `compare_vocabularies`.

        Thousands of them take a second, so a caller should let other tasks run in between.
        """
        for target_name in self._known(model_pb2.ROLE_TARGET)[0]:
            # Anew for each target, because services come and go.
            targets, away = self._known(model_pb2.ROLE_TARGET)
            drafts, problems = self._known(model_pb2.ROLE_DRAFT)
            if (target := targets.get(target_name)) is None:
                continue
            key, plain = key_of(target), self.plain_bytes_per_second(target)
            candidates = {name: self.candidate(target, one) for name, one in drafts.items()}
            expected = {name: self.chooser.expect(key, one, workload) for name, one in candidates.items()}
            refusals = {
                name: away[target_name] or problems[name] or self.refusal(target, one) for name, one in drafts.items()
            }
            usable = [name for name in drafts if not refusals[name]]
            ready = [name for name in usable if not self.pauses.holds(target, drafts[name])]
            best = max(ready or usable, key=lambda name: expected[name].gain, default=None)
            for name, draft in drafts.items():
                gain = expected[name].gain
                record = self.chooser.record(key, candidates[name].key, workload)
                yield PairState(
                    target,
                    draft,
                    refusals[name],
                    name == best,
                    expected[name],
                    gain * plain,
                    record,
                    self._overlaps.get(_vocabularies(target, draft), 0.0),
                )

    def _known(self, role: model_pb2.Role.ValueType) -> tuple[dict[str, Endpoint], dict[str, str]]:
        """Returns the known model of each name, a usable one if there is one, and what is wrong with it, or ""."""
        found: dict[str, Endpoint] = {}
        problems: dict[str, str] = {}
        for one in self.zoo.connections:
            if one.known and one.role == role:
                name, problem = one.known.model.name, one.problem or self.zoo.conflict(one)
                if name not in found or (problems[name] and not problem):
                    found[name], problems[name] = one.known, problem
        return found, problems


def _same_server(one: Endpoint, other: Endpoint) -> bool:
    """Returns whether two services are one process, whose address may be written in several ways."""
    instance = one.description.instance_id
    return one.address == other.address or bool(instance and instance == other.description.instance_id)


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
