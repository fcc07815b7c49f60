"""How a token is chosen from logits. The same code for draft and target, at every temperature."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import EngineFailure, InvalidField
from bridge.noise import GUMBEL_RANGE, Int64, gumbel

Logits = NDArray[np.float32]

# How far below the best one, in nats, top_p begins to look for the ids that it keeps, instead of sorting all of them.
_FIRST_DEPTH = 4.0


@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are chosen and what ends a text; names and meanings follow Hugging Face `generate` and vLLM.

    A top_k of 0 is off. `stop_token_ids` end the text beside the model's own ends, `ignore_eos` leaves out those;
    none of either is chosen before `min_tokens` tokens are.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def checked(self, known: Callable[[int], bool] | None = None) -> "SamplingParameters":
        """Itself; raises `InvalidField`. `known`: whether there is such an id, once it is clear whose they are."""
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        if self.top_p is not None:
            _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        if self.min_p is not None:
            _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty
            _check("repetition_penalty", penalty, 0.001 <= penalty <= 100.0, "between 0.001 and 100")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, value is None or -100.0 <= value <= 100.0, "between -100 and 100")
        for id_, bias in self.logit_bias.items():
            _check(f"logit_bias[{id_}]", bias, -1e9 <= bias <= 1e9, "between -1e9 and 1e9")
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for id_ in ids:
                _check(name, id_, known is None or known(id_), "of ids that the target has a token for")
        return self

    def for_draft(self, temperature: float | None = None) -> "SamplingParameters":
        """What a draft shares: temperature (or another) and truncation, nothing about single ids or the text's end."""
        return SamplingParameters(
            temperature=self.temperature if temperature is None else temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    def ends(self, eos: Iterable[int]) -> frozenset[int]:
        """Ids that end a text of a model whose own ends are `eos`."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos))

    @property
    def looks_back(self) -> bool:
        """Whether what is chosen depends on what was."""
        neutral = (None, 1.0), (None, 0.0), (None, 0.0)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return any(value not in off for value, off in zip(penalties, neutral, strict=True))


def _check(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise InvalidField(f"sampling.{name}", allowed, value)


class History:
    """What penalties and `min_tokens` look at: the ids of the prompt, and those generated since, with their counts."""

    def __init__(self, prompt: Iterable[int], generated: Iterable[int] = ()) -> None:
        self._prompt = frozenset(prompt)
        self._counts: dict[int, int] = {}
        self.generated_token_count = 0
        self.extend(generated)

    def extend(self, ids: Iterable[int]) -> None:
        """Adds generated ids."""
        for id_ in ids:
            self._counts[id_] = self._counts.get(id_, 0) + 1
            self.generated_token_count += 1

    def copy(self) -> "History":
        """One of its own, to go on from here and perhaps be thrown away."""
        copied = History(())
        copied._prompt, copied._counts = self._prompt, dict(self._counts)
        copied.generated_token_count = self.generated_token_count
        return copied

    def seen(self) -> Int64:
        """Every id so far, each once."""
        return np.fromiter(self._prompt | self._counts.keys(), np.int64)

    def generated(self) -> tuple[Int64, Int64]:
        """Ids generated so far, each once, and how often."""
        return np.fromiter(self._counts, np.int64), np.fromiter(self._counts.values(), np.int64)


@dataclass(frozen=True)
class Choice:
    """A chosen token, and what was asked for besides.

    `near_tie`: another one was so close behind it that rounding may have decided. `probability`: under what it was
    sampled from.
    """

    token_id: int
    near_tie: bool = False
    probability: float | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens of one vocabulary for one request.

    `keys`: the noise key of each id, shape [size]; `missing`: ids that no token has. Columns of the
    logits beyond `size` are padding and never chosen. `ends`: ids that end the text. `logprobs`: how many
    alternatives to report. `tolerance`: a lead in logits so small that it may be owed to rounding. `confident`:
    whether to say how probable a choice was.
    """

    parameters: SamplingParameters
    seed: int
    keys: Int64
    missing: Int64
    ends: frozenset[int] = frozenset()
    logprobs: int | None = None
    tolerance: float = 0.0
    confident: bool = False

    def choose(self, logits: Logits, offset: int, counter: int, history: History | None = None) -> Choice:
        """The token at `offset` generated bytes, behind `counter` tokens without bytes; logits [columns].

        `history`: the tokens before it; needed only where the parameters look back. Log probabilities that are
        reported are the model's own, before penalties and temperature.
        """
        size = min(len(self.keys), len(logits))
        scores = logits[:size]
        if len(self.missing):
            scores = scores.copy()
            scores[self.missing[self.missing < size]] = -np.inf
        if not np.isfinite(best := scores.max()):
            raise EngineFailure(
                f"the model's best logit is {best}: its weights are damaged, or overflow in this dtype; try float32"
            )
        adjusted = self._adjusted(scores, history)
        if adjusted is not scores and not np.isfinite(adjusted.max()):
            raise EngineFailure("nothing may be chosen: every id ends the text, and min_tokens allows no end yet")
        temperature = self.parameters.temperature
        if temperature == 0.0:
            token_id, lead = _best(adjusted)
            return self._report(token_id, scores, lead, adjusted, token_id)
        kept, scaled = _truncate(adjusted, self.parameters)
        winner, lead = _best(scaled + gumbel(self.seed, offset, counter, self.keys[kept]))
        return self._report(int(kept[winner]), scores, lead * temperature, scaled, winner)

    def _adjusted(self, scores: Logits, history: History | None) -> Logits:
        """In the order of Hugging Face's processors; presence and frequency, which it has not, behind repetition."""
        parameters = self.parameters
        early = history is not None and history.generated_token_count < parameters.min_tokens
        if not (parameters.logit_bias or parameters.looks_back or early):
            return scores
        scores = scores.copy()
        for id_, bias in parameters.logit_bias.items():
            scores[id_] += np.float32(bias)
        if history is not None and parameters.looks_back:
            if (penalty := parameters.repetition_penalty) is not None:
                seen = history.seen()
                seen = seen[seen < len(scores)]  # a prompt may have ids that are none of the tokenizer's
                before = scores[seen]
                scores[seen] = np.where(before < 0, before * np.float32(penalty), before / np.float32(penalty))
            ids, counts = history.generated()
            scores[ids] -= np.float32(parameters.frequency_penalty or 0.0) * counts.astype(np.float32)
            scores[ids] -= np.float32(parameters.presence_penalty or 0.0)
        if early:
            scores[list(self.ends)] = -np.inf
        return scores

    def _report(
        self, token_id: int, scores: Logits, lead: float, sampled: NDArray[np.floating[Any]], index: int
    ) -> Choice:
        """A token, chosen at an index of what was sampled from."""
        probability = _probability(sampled, index) if self.confident else None
        near_tie = lead < self.tolerance
        if self.logprobs is None:
            return Choice(token_id, near_tie, probability)
        logp = scores.astype(np.float64) - _log_sum_exp(scores.astype(np.float64))
        best = np.argsort(-logp, kind="stable")[: self.logprobs]
        top = tuple((int(id_), float(logp[id_])) for id_ in best if np.isfinite(logp[id_]))
        return Choice(token_id, near_tie, probability, float(logp[token_id]), top)


def _log_sum_exp(scores: NDArray[np.float64]) -> float:
    largest = scores.max()
    return float(largest + np.log(np.exp(scores - largest).sum()))


def _best(scores: NDArray[np.floating[Any]]) -> tuple[int, float]:
    """The index of the largest and its lead over the next."""
    best = int(scores.argmax())
    others = max(scores[:best].max(initial=-np.inf), scores[best + 1 :].max(initial=-np.inf))
    return best, float(scores[best]) - float(others)


def _probability(scores: NDArray[np.floating[Any]], index: int) -> float:
    # float32 is enough for a confidence, and a third of the time over a large vocabulary.
    return float(1.0 / np.exp((scores - scores[index]).astype(np.float32)).sum())


def _truncate(scores: Logits, parameters: SamplingParameters) -> tuple[Int64, NDArray[np.float64]]:
    """Ids that may be chosen, ascending, and their log probabilities less that of the best one.

    In the order of Hugging Face's warpers: temperature, top_k, top_p, min_p, each over what the one before left.
    """
    best = float(scores.max())
    # What no noise can bring to the top is left out from the start.
    floor = np.nextafter(np.float32(best - GUMBEL_RANGE * parameters.temperature), np.float32(-np.inf))
    if parameters.top_k and parameters.top_k < len(scores):
        # Temperature changes no order. Ids as good as the last kept stay too, as they do in Hugging Face's.
        floor = max(floor, np.partition(scores, -parameters.top_k)[-parameters.top_k])
    kept = np.flatnonzero(scores >= floor)
    # The best becomes 0 first, so that the smallest temperature overflows in no place that counts.
    with np.errstate(over="ignore"):
        scaled = (scores[kept].astype(np.float64) - best) / parameters.temperature
    if parameters.top_p is not None and parameters.top_p < 1.0:
        inside = _nucleus(scaled, parameters.top_p)
        kept, scaled = kept[inside], scaled[inside]
    if parameters.min_p:
        inside = np.flatnonzero(scaled >= math.log(parameters.min_p))
        kept, scaled = kept[inside], scaled[inside]
    return kept, scaled


def _nucleus(scores: NDArray[np.float64], top_p: float) -> Int64:
    """Indices, ascending, of the fewest best scores whose probabilities add up to `top_p`; the best score is 0."""
    total = float(np.exp(scores).sum())
    depth = _FIRST_DEPTH
    while True:
        near = np.flatnonzero(scores >= -depth)
        # Of equals the later one counts as better, as in Hugging Face's stable sort from the worst up.
        ordered = near[np.argsort(scores[near], kind="stable")[::-1]]
        probabilities = np.exp(scores[ordered]) / total
        better = np.cumsum(probabilities) - probabilities
        inside = better < top_p
        if not inside.all() or len(near) == len(scores):
            inside[0] = True
            return np.sort(ordered[inside])
        depth *= 2
