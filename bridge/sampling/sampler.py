"""Chooses a token from logits, in the same way for draft and target and at every temperature."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import BrokenLogits, EngineFailure, InvalidField, require
from bridge.sampling.grammar import Grammar
from bridge.sampling.noise import GUMBEL_RANGE, Float64, Int64, gumbel, reaching

Logits = NDArray[np.float32]

# The range of each parameter, and its description in an error.
_RANGES = {
    "temperature": (0.0, 100.0, "between 0 and 100"),
    "top_p": (math.ulp(0.0), 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
    "repetition_penalty": (0.001, 100.0, "between 0.001 and 100"),
    "presence_penalty": (-100.0, 100.0, "between -100 and 100"),
    "frequency_penalty": (-100.0, 100.0, "between -100 and 100"),
}
# top_p first considers the ids that are at most this far below the best score, instead of sorting all ids.
_FIRST_DEPTH_NATS = 4.0
# Probabilities are reported as if the temperature were at least this high, so that scores divided by it are finite.
_MIN_TEMPERATURE = 1e-6
# A draft's default temperature as a share of the request's. A small model's distribution is flatter than the target's,
# so at the same temperature it proposes unlikely tokens too often (docs/measurements/sampling.md).
_DRAFT_TEMPERATURE_SHARE = 0.85
# Sampling from all ids first considers at least this many of the best ones, which it finds by the maxima of this
# number of parts.
_NEAR_COUNT, _PARTS = 64, 512


@dataclass(frozen=True)
class SamplingParameters:
    """Sets how tokens are chosen and what ends a text. Names and meanings are those of Hugging Face and vLLM.

    A `top_k` of 0 is off. `stop_token_ids` end the text like the model's own eos ids, which `ignore_eos` switches off.
    Neither kind can be chosen among the first `min_tokens` tokens. `grammar`: what the text must be.
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
    grammar: Grammar | None = None

    def checked(self, has_all: Callable[[Sequence[int]], bool] | None = None) -> "SamplingParameters":
        """Returns itself, or raises `InvalidField`. `has_all`: see `Model.has_all`; None if the model is not known."""
        for name, (low, high, allowed) in _RANGES.items():
            value = getattr(self, name)
            require(value is None or low <= value <= high, InvalidField, f"sampling.{name}", allowed, value)
        # There may be 100,000 biases. Above 1e4, the sums would be too coarse in float32 to tell two such ids apart.
        biases = np.fromiter(self.logit_bias.values(), np.float64, len(self.logit_bias))
        if (wrong := ~((biases >= -1e9) & (biases <= 1e4))).any():
            id_, bias = list(self.logit_bias.items())[wrong.argmax()]
            raise InvalidField(f"sampling.logit_bias[{id_}]", "between -1e9 and 1e4", bias)
        for name, ids in (("logit_bias", tuple(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            if has_all and not has_all(ids):
                unknown = next(id_ for id_ in ids if not has_all((id_,)))
                raise InvalidField(f"sampling.{name}", "ids that the target has a token for", unknown)
        if self.grammar:
            self.grammar.checked()
            allowed = "false with a grammar, which ends the text"
            require(not self.ignore_eos, InvalidField, "sampling.ignore_eos", allowed, self.ignore_eos)
        return self

    @property
    def truncates(self) -> bool:
        """Returns whether only some of the ids may be sampled."""
        return bool(self.top_k or self.min_p) or (self.top_p is not None and self.top_p < 1.0)

    def for_draft(self, temperature: float | None = None) -> "SamplingParameters":
        """Returns the parameters for a draft: temperature, truncation and grammar, without those on ids or the end.

        `temperature` is the draft's, instead of the default, which is a little lower than the request's.
        """
        temperature = _DRAFT_TEMPERATURE_SHARE * self.temperature if temperature is None else temperature
        return SamplingParameters(temperature, self.top_k, self.top_p, self.min_p, grammar=self.grammar)

    def ends(self, eos: Iterable[int]) -> frozenset[int]:
        """Returns the ids that end a text, for a model whose own such ids are `eos`."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos)


class History:
    """Holds what penalties and `min_tokens` depend on: the ids of the prompt, and the count of each generated id."""

    def __init__(self, prompt: Iterable[int], generated: Iterable[int] = ()) -> None:
        self._prompt = frozenset(prompt)
        self._counts = Counter(generated)

    @property
    def generated_token_count(self) -> int:
        return self._counts.total()

    def extend(self, ids: Iterable[int]) -> None:
        self._counts.update(ids)

    def copy(self) -> "History":
        return History(self._prompt, self._counts)

    def seen(self) -> Int64:
        """Returns the distinct ids of the prompt and the generated text."""
        return np.fromiter(self._prompt | self._counts.keys(), np.int64)

    def generated(self) -> tuple[Int64, Int64]:
        """Returns the distinct generated ids, and the number of occurrences of each."""
        return np.fromiter(self._counts, np.int64), np.fromiter(self._counts.values(), np.int64)


@dataclass(frozen=True)
class Choice:
    """A chosen token.

    `near_tie`: another token was so close that rounding may have decided. `probability` is in the distribution that the
    token was sampled from, `logprob` and `top_logprobs` are in the model's own, before penalties and temperature.
    `runner_up`: the id that would have been chosen in its place, and its probability: 0 if no other one could be.
    """

    token_id: int
    near_tie: bool = False
    probability: float | None = None
    runner_up: tuple[int, float] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens of one vocabulary for one request.

    `keys`: the noise key of each id, shape [size]; logits beyond `size` are padding and never chosen. `missing`: ids
    without a token. `ends`: ids that end the text. `logprobs`: the number of alternatives to report; None for no log
    probabilities. `tolerance`: the largest difference of logits from rounding. `confident`: report probabilities.
    """

    parameters: SamplingParameters
    seed: int
    keys: Int64
    missing: Int64
    ends: frozenset[int] = frozenset()
    logprobs: int | None = None
    tolerance: float = 0.0
    confident: bool = False

    def choose(
        self,
        logits: Logits,
        offset: int,
        counter: int,
        history: History | None = None,
        allowed: NDArray[np.bool_] | None = None,
    ) -> Choice:
        """Returns the token after `offset` generated bytes and, at that offset, `counter` tokens without bytes.

        `logits`: shape [columns]. `history`: the tokens so far, needed for penalties and `min_tokens`. `allowed`: which
        ids a grammar allows, at least one, shape [size of the vocabulary]. Raises `BrokenLogits` if the best logit is
        not finite, and `EngineFailure` if `min_tokens` leaves no id to choose.
        """
        size = min(len(self.keys), len(logits))
        scores = logits[:size]
        if len(self.missing):
            scores = scores.copy()
            scores[self.missing[self.missing < size]] = -np.inf
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            raise BrokenLogits(float(scores[best]))
        adjusted = self._adjusted(scores, history, allowed)
        if adjusted is not scores:
            best = int(adjusted.argmax())
        if not np.isfinite(adjusted[best]):
            raise EngineFailure("no token may be chosen: every id ends the text, which min_tokens does not allow yet")
        if self.parameters.temperature:
            token_id, next_id, lead, probabilities = self._sample(adjusted, float(adjusted[best]), offset, counter)
        else:
            token_id, (next_id, lead) = best, _next(adjusted, best)
            probabilities = _probabilities(adjusted, [best, next_id]) if self.confident else []
        logprob, top_logprobs = (None, ()) if self.logprobs is None else _logprobs(scores, token_id, self.logprobs)
        probability, runner_up = None, None
        if probabilities:
            # If no other id may be chosen, the chosen one is reported again.
            probability, runner_up = probabilities[0], (next_id, 0.0 if next_id == token_id else probabilities[1])
        return Choice(token_id, lead < self.tolerance, probability, runner_up, logprob, top_logprobs)

    @cached_property
    def _biases(self) -> tuple[Int64, NDArray[np.float32]]:
        """The ids of `logit_bias`, up to the whole vocabulary, and their biases."""
        bias = self.parameters.logit_bias
        return np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    @cached_property
    def _end_ids(self) -> Int64:
        return np.fromiter(self.ends, np.int64, len(self.ends))

    def _sample(self, scores: Logits, best: float, offset: int, counter: int) -> tuple[int, int, float, list[float]]:
        """Returns an id, the next one, how much higher the score of that would have to be, and their probabilities.

        `best`: the best score.
        """
        parameters, temperature = self.parameters, self.parameters.temperature
        if parameters.truncates:
            kept, scaled = _truncate(scores, parameters)
        else:
            kept = self._contenders(scores, best, offset, counter)
            scaled = _scaled(scores[kept], best, temperature)
        sums = scaled + gumbel(self.seed, offset, counter, self.keys[kept])
        index = int(sums.argmax())
        second, lead = _next(sums, index)
        token_id, next_id, probabilities = int(kept[index]), int(kept[second]), list[float]()
        if self.confident and parameters.truncates:
            probabilities = _probabilities(scaled, [index, second])
        elif self.confident:
            tempered = scores / np.float32(max(temperature, _MIN_TEMPERATURE))
            probabilities = _probabilities(tempered, [token_id, next_id])
        return token_id, next_id, lead * temperature, probabilities

    def _contenders(self, scores: Logits, best: float, offset: int, counter: int) -> Int64:
        """Returns the ids, ascending, that may have one of the two largest sums of score and noise.

        Noise for all ids would take longer than anything else here, so it is computed for some of the best ids. Any
        other id needs enough noise to exceed the second largest of their sums.
        """
        temperature = self.parameters.temperature
        # Rounding may have decided against ids that are lower by the tolerance: they count for `Choice.near_tie`.
        keys, floor = self.keys[: len(scores)], _floor(best - self.tolerance, temperature)
        # Each part of the ids has at least one score that is as high as its maximum.
        parts = scores[: len(scores) // _PARTS * _PARTS].reshape(-1, _PARTS).max(axis=0, initial=-np.inf)
        limit = np.partition(parts, -_NEAR_COUNT)[-_NEAR_COUNT]
        if limit <= floor:
            return np.flatnonzero(scores >= floor)
        near = np.flatnonzero(scores >= limit)
        sums = _scaled(scores[near], best, temperature) + gumbel(self.seed, offset, counter, keys[near])
        least = float(np.partition(sums, -2)[-2]) - float(_scaled(np.array([limit]), best, temperature)[0])
        if not math.isfinite(least):  # the temperature is so low that differences overflow
            return np.flatnonzero(scores >= floor)
        others = reaching(self.seed, offset, counter, keys, least)
        others = others[(scores[others] >= floor) & (scores[others] < limit)]
        return np.sort(np.concatenate([near, others]))

    def _adjusted(self, scores: Logits, history: History | None, allowed: NDArray[np.bool_] | None = None) -> Logits:
        """Applies bias and penalties in the order of Hugging Face's logits processors, then the grammar.

        Presence and frequency penalties, which these lack, follow the repetition penalty.
        """
        parameters = self.parameters
        repetition = parameters.repetition_penalty or 1.0
        presence, frequency = parameters.presence_penalty or 0.0, parameters.frequency_penalty or 0.0
        penalized = history if (repetition, presence, frequency) != (1.0, 0.0, 0.0) else None
        early = parameters.min_tokens and history and history.generated_token_count < parameters.min_tokens
        if not (parameters.logit_bias or penalized or early):
            return scores if allowed is None else np.where(allowed[: len(scores)], scores, np.float32(-np.inf))
        scores = scores.copy()
        biased, biases = self._biases
        known = biased < len(scores)  # a model may lack added tokens of its tokenizer
        scores[biased[known]] += biases[known]
        if penalized:
            seen = penalized.seen()
            seen = seen[seen < len(scores)]  # a prompt may contain ids that the tokenizer lacks
            before = scores[seen]
            scores[seen] = np.where(before < 0, before * np.float32(repetition), before / np.float32(repetition))
            ids, counts = penalized.generated()
            known = ids < len(scores)  # a peer's text may contain ids beyond the tokenizer
            scores[ids[known]] -= np.float32(frequency) * counts[known].astype(np.float32)
            scores[ids[known]] -= np.float32(presence)
        if allowed is not None:
            scores[~allowed[: len(scores)]] = -np.inf
        if early:
            ends = self._end_ids[self._end_ids < len(scores)]
            ending = scores[ends]
            scores[ends] = -np.inf
            if allowed is not None and not np.isfinite(scores.max()):  # the grammar allows nothing but the end
                scores[ends] = ending
        return scores


def _probabilities(scores: NDArray[np.floating[Any]], indices: list[int]) -> list[float]:
    # float32 is exact enough for a confidence, and takes a third of the time with a large vocabulary.
    weights = np.exp((scores - scores.max()).astype(np.float32, copy=False))
    found: list[float] = (weights[indices] / weights.sum()).tolist()
    return found


def _logprobs(scores: Logits, token_id: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Returns the log probability of a token, and the `count` best ids with theirs."""
    logp = scores.astype(np.float64) - scores.max()
    logp -= np.log(np.exp(logp).sum())
    count = min(count, len(logp))
    if not count:
        return float(logp[token_id]), ()
    near = np.flatnonzero(logp >= np.partition(logp, -count)[-count])  # sorting all would take longer than a forward
    best = near[np.argsort(-logp[near], kind="stable")][:count]
    return float(logp[token_id]), tuple((int(id_), float(logp[id_])) for id_ in best if np.isfinite(logp[id_]))


def _next(scores: NDArray[np.floating[Any]], best: int) -> tuple[int, float]:
    """Returns the index of the second largest score, and how far the largest, which has the index `best`, is above.

    Without a second one, returns `best` and infinity.
    """
    parts = [(start, part) for start, part in ((0, scores[:best]), (best + 1, scores[best + 1 :])) if len(part)]
    if not parts:
        return best, np.inf
    second = max((start + int(part.argmax()) for start, part in parts), key=scores.__getitem__)
    return second, float(scores[best]) - float(scores[second])


def _floor(best: float, temperature: float, depth: float = GUMBEL_RANGE) -> np.float32:
    """Returns the score that is `depth` below the best at that temperature, or less, so that rounding excludes no id.

    By default, no noise can make an id below it the best.
    """
    floor: np.float32 = np.nextafter(np.float32(best - depth * temperature), np.float32(-np.inf))
    return floor


def _scaled(scores: Logits, best: float, temperature: float) -> Float64:
    """Returns scores divided by temperature, shifted so that the best is 0."""
    # With the best subtracted first, a tiny temperature overflows only for scores far below the best.
    with np.errstate(over="ignore"):
        return (scores.astype(np.float64) - best) / temperature


def _truncate(scores: Logits, parameters: SamplingParameters) -> tuple[Int64, Float64]:
    """Returns the ids that may be chosen, ascending, and their scores divided by temperature, shifted so the best is 0.

    The order is that of Hugging Face's warpers: temperature, top_k, top_p, min_p, each on what the previous one left.
    """
    best, temperature = float(scores.max()), parameters.temperature
    floor = _floor(best, temperature)
    if parameters.top_k and parameters.top_k < len(scores):
        # Temperature does not change the order. Ids that tie with the last one kept stay too, as in Hugging Face's.
        floor = max(floor, np.partition(scores, -parameters.top_k)[-parameters.top_k])
    if parameters.top_p is not None and parameters.top_p < 1.0:
        kept = _nucleus(scores, temperature, floor, parameters.top_p)
    elif parameters.min_p:  # most ids are left out at once; rounding decides about none of them
        kept = np.flatnonzero(scores >= max(floor, _floor(best, temperature, -math.log(parameters.min_p))))
    else:
        kept = np.flatnonzero(scores >= floor)
    scaled = _scaled(scores[kept], best, temperature)
    if parameters.min_p:
        inside = np.flatnonzero(scaled >= math.log(parameters.min_p))
        kept, scaled = kept[inside], scaled[inside]
    return kept, scaled


def _nucleus(scores: Logits, temperature: float, floor: np.float32, top_p: float) -> Int64:
    """Returns the ids, ascending, of the fewest best scores whose probabilities sum to `top_p`.

    All scores below `floor` have no probability.
    """
    depth, weights = _FIRST_DEPTH_NATS, np.exp(_scaled(scores, float(scores.max()), temperature))
    weights[scores < floor] = 0.0
    total = float(weights.sum())
    while True:
        near = np.flatnonzero(weights >= math.exp(-depth))
        # Among equal scores the later one is kept first, as in Hugging Face's stable ascending sort.
        ordered = near[np.argsort(weights[near], kind="stable")[::-1]]
        probabilities = weights[ordered] / total
        better = np.cumsum(probabilities) - probabilities
        inside = better < top_p
        if not inside.all() or depth > GUMBEL_RANGE:
            inside[0] = True
            return np.sort(ordered[inside])
        depth *= 2
