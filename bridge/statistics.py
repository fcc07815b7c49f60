"""Counts what a generation did, from the outcomes of its passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.planning.prediction import Plan
from bridge.sources.source import DRAFT, CandidateSource, Outcome


@dataclass
class SourceStatistics:
    """Counts what one source did, in the target's tokens (`proposed_token_count` is in the source's own)."""

    name: str
    proposed_token_count: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_byte_count: int = 0
    compute_ns: int = 0


@dataclass
class PlanStatistics:
    """Compares the passes made under plans of one name with what was predicted, those whose time is known.

    `plain_ns`: the predicted time of the same tokens in passes without candidates.
    """

    plan: str
    target_pass_count: int = 0
    token_count: int = 0
    elapsed_ns: int = 0
    predicted_token_count: float = 0.0
    predicted_ns: float = 0.0
    plain_ns: float = 0.0


@dataclass
class DraftPasses:
    """Counts the passes by which drafts are judged: those with candidates of a draft only, or with none.

    `plain_passes`: their time, in times of a plain pass of the target under the same load.
    """

    pass_count: int = 0
    token_count: int = 0
    plain_passes: float = 0.0


@dataclass(frozen=True)
class DraftChoice:
    """The choice of a draft. `second_best` is empty if that is the target alone; speeds are in bytes per second."""

    draft: str
    bytes_per_second: float
    second_best: str
    second_best_bytes_per_second: float
    explores: bool
    request_count: float


@dataclass
class Statistics:
    """Counts what a generation did. Token counts are in the target's tokens, times in nanoseconds."""

    target_pass_count: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    accepted_byte_count: int = 0
    verify_ns: int = 0
    bridge_ns: int = 0
    waited_ns: int = 0
    network_ns: int = 0
    near_ties: int = 0
    cached_token_count: int = 0
    note: str = ""
    plan_summary: str = ""
    current_plan: str = ""
    sources: dict[str, SourceStatistics] = field(default_factory=dict)
    plans: dict[str, PlanStatistics] = field(default_factory=dict)
    # Those whose time is known.
    draft_passes: DraftPasses = field(default_factory=DraftPasses)
    # The names of the drafts that took part, in order, and why the first one was chosen.
    drafts: list[str] = field(default_factory=list)
    draft_choice: DraftChoice | None = None

    @property
    def reported(self) -> dict[str, Any]:
        """Returns what clients receive, by the names of the contract. Cached tokens are a part of the usage."""
        left_out = ("cached_token_count", "draft_passes")
        return {name: value for name, value in vars(self).items() if name not in left_out} | {
            # Meaningful only as a sum, which may be negative while the request runs.
            "network_ns": max(self.network_ns, 0),
            "predicted_tokens_per_second": self._per_second("predicted_token_count", "predicted_ns"),
            "measured_tokens_per_second": self._per_second("token_count", "elapsed_ns"),
            "plain_tokens_per_second": self._per_second("token_count", "plain_ns"),
            "sources": [vars(source) for source in self.sources.values()],
            "plans": [vars(plan) for plan in self.plans.values()],
            "draft_choice": vars(self.draft_choice) if self.draft_choice else None,
        }

    def _per_second(self, count: str, ns: str) -> float:
        """Returns a speed over all passes whose time is known, or 0 without such passes."""
        counted, total_ns = (sum(getattr(one, name) for one in self.plans.values()) for name in (count, ns))
        return 1e9 * counted / total_ns if total_ns else 0.0

    def observe(self, outcome: Outcome, plan: Plan) -> None:
        """Counts a pass that was made under a plan."""
        result = outcome.result
        accepted, branches = len(outcome.accepted_sources), outcome.tried.branches[: result.branch_count]
        if self.target_pass_count == 0:
            self.cached_token_count = result.cached_token_count
        self.target_pass_count += 1
        self.num_drafts += result.candidate_token_count > 0
        self.num_draft_tokens += result.candidate_token_count + result.branch_count
        self.num_accepted_tokens += accepted
        self.num_accepted_tokens_per_position += [0] * (accepted - len(self.num_accepted_tokens_per_position))
        for place in range(accepted):
            self.num_accepted_tokens_per_position[place] += 1
        self.accepted_byte_count += sum(map(len, outcome.data[:accepted]))
        self.near_ties += result.near_tie_count
        self.verify_ns += result.forward_ns
        self.waited_ns += result.waited_ns
        for name in dict.fromkeys(outcome.tried.sources):
            self.sources.setdefault(name, SourceStatistics(name)).num_drafts += 1
        for place, name in enumerate(outcome.tried.sources):
            source = self.sources[name]
            source.num_draft_tokens += 1
            if place < accepted:
                source.num_accepted_tokens += 1
                source.accepted_byte_count += len(outcome.data[place])
        for branch in branches:
            self.sources[outcome.tried.sources[branch.index]].num_draft_tokens += 1
        if outcome.elapsed_ns is None:
            return
        # Passes may arrive in bunches, so only the sum of these differences is meaningful.
        self.network_ns += outcome.elapsed_ns - result.forward_ns - result.waited_ns
        counted = self.plans.setdefault(plan.name, PlanStatistics(plan.name))
        counted.target_pass_count += 1
        counted.token_count += len(result.token_ids)
        counted.elapsed_ns += outcome.elapsed_ns
        counted.predicted_token_count += plan.prediction.tokens
        counted.predicted_ns += plan.prediction.ns
        counted.plain_ns += len(result.token_ids) * plan.plain_ns
        self.current_plan = plan.description
        # Prompt lookup shows nothing about a draft. A pass may have its candidates whatever the plan is.
        if plan.plain_ns and plan.source in ("", DRAFT) and set(outcome.tried.sources) <= {DRAFT}:
            self.draft_passes.pass_count += 1
            self.draft_passes.token_count += len(result.token_ids)
            self.draft_passes.plain_passes += outcome.elapsed_ns / plan.plain_ns

    def finish(self, sources: Sequence[CandidateSource]) -> None:
        """Adds the counts that only the sources have."""
        for source in sources:
            counted = self.sources.setdefault(source.name, SourceStatistics(source.name))
            counted.proposed_token_count += source.proposed_token_count
            counted.compute_ns += source.compute_ns
