"""Finds earlier occurrences of a text's last tokens, and proposes the tokens that followed them.

Whole tokens match, so that even a match of one short token is useful: after " a" as a token, a new word begins, which
matching bytes do not show. After Saxena, "Prompt Lookup Decoding" (2023). As in Oliaro et al., "SuffixDecoding" (2024),
the number of occurrences that agree counts, too.
"""

from array import array
from collections.abc import Sequence

import numpy as np

# Tokens of a proposal: enough for several passes.
MAX_PROPOSED_TOKENS = 64
# Longer matches predict no better.
_MAX_MATCH_TOKENS = 16
# The latest occurrences of the last token that are looked at, besides those that have matched so far.
_LATEST_PLACES = 8
# The number of tokens at the end of an addition that are searched for matches one by one. Few passes yield more.
_MAX_PASS_TOKENS = 16
# The odds that a proposed token is right, fitted to texts of two models (see docs/concepts/speculation.md): a power of
# the number of tokens that match before it. If several places match, the odds are higher if all agree, and lower if
# some differ.
_ODDS_OF_ONE, _ODDS_POWER, _ODDS_OF_AGREEMENT = 1 / 3, 1.5, 4.5


def confidence(matched: int, agreeing: int = 1, places: int = 1) -> float:
    """Returns the chance that a proposed token is right, if all before it are.

    `matched`: the tokens before it that match at the best place. Of all `places` where at least one token matches,
    `agreeing` are followed by this token.
    """
    agreement = _ODDS_OF_AGREEMENT if agreeing == places > 1 else agreeing / places
    odds: float = _ODDS_OF_ONE * min(matched, _MAX_MATCH_TOKENS) ** _ODDS_POWER * agreement
    return odds / (1 + odds)


# The confidence in the tokens after a single place, by the tokens that match before them.
_OF_ONE_PLACE = [confidence(matched) for matched in range(_MAX_MATCH_TOKENS + MAX_PROPOSED_TOKENS + 1)]


class TokenLookup:
    """Finds matches of the end of a text, given its ids, to which others append.

    Time is constant per token and per match; memory is about 110 bytes per token at most. A place is the index of the
    token after an occurrence.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = token_ids
        ids = np.asarray(token_ids[:-_MAX_PASS_TOKENS], np.int64)
        order = np.argsort(ids, kind="stable")
        again = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
        before = np.zeros(len(ids), np.int32)
        before[order[again + 1]] = order[again] + 1
        # For each token, the place after its occurrence before; 0 without one. For each id, its last place.
        self._before = array("i", before.tobytes())
        self._last = dict(zip(ids.tolist(), range(1, len(ids) + 1), strict=True))
        # The places that match the end of the text, each after the number of tokens that match: the longest first.
        self._places: list[tuple[int, int]] = []
        self._read()

    def match(
        self, limit: int = MAX_PROPOSED_TOKENS, after: Sequence[int] = (), min_token_count: int = 1
    ) -> tuple[list[int], list[float]]:
        """Returns what followed the longest match of the text's end, at most `limit` ids, and their confidences.

        Of several such matches, the latest one counts. At the text's end, the proposal repeats. Both lists are empty if
        fewer than `min_token_count` tokens match. `after`: tokens that are taken as the text's end though they are not
        appended; only the latest places of the last one of them are looked at.
        """
        self._read()
        limit, matches = min(limit, MAX_PROPOSED_TOKENS) + len(after), self._places
        if after:
            recent = [*self._ids[-_MAX_MATCH_TOKENS:], *after][-_MAX_MATCH_TOKENS:]
            matches = self._found([], recent, self._last.get(after[-1], 0))
        if not matches or matches[0][0] < min_token_count:
            return [], []
        length, end = matches[0][0] - len(after), len(self._ids)
        places, ids, confidences = [place for _, place in matches], list(after), list[float]()
        while len(places) > 1 and len(ids) < limit:
            following = [self._ids[place] if place < end else ids[place - end] for place in places]
            agreeing = [place + 1 for place, id_ in zip(places, following, strict=True) if id_ == following[0]]
            confidences.append(confidence(length + len(ids), len(agreeing), len(places)))
            ids.append(following[0])
            places = agreeing
        matched = min(length + len(ids), _MAX_MATCH_TOKENS)
        confidences += _OF_ONE_PLACE[matched : matched + limit - len(ids)]
        place, period = places[0], end + len(ids) - places[0]
        ids += self._ids[place : place + limit - len(ids)]
        while len(ids) < limit:
            ids += ids[-period:][: limit - len(ids)]
        return ids[len(after) :], confidences

    def _read(self) -> None:
        """Indexes the tokens that were appended."""
        ids, first, end = self._ids, len(self._before), len(self._ids)
        if end - first > _MAX_PASS_TOKENS:
            self._places = []
        for index in range(first, end):
            id_ = ids[index]
            self._before.append(self._last.get(id_, 0))
            self._last[id_] = index + 1
            if end - index <= _MAX_PASS_TOKENS:
                # A place that is among the latest of an earlier token need not be among those of the last one.
                followed = [(length + 1, place + 1) for length, place in self._places if ids[place] == id_]
                recent = ids[max(index + 1 - _MAX_MATCH_TOKENS, 0) : index + 1]
                self._places = self._found(followed, recent, self._before[-1])

    def _found(self, followed: Sequence[tuple[int, int]], recent: Sequence[int], place: int) -> list[tuple[int, int]]:
        """Returns the places that go on matching `recent` tokens, and the latest ones from `place` on back."""
        found, known = list(followed), {place for _, place in followed}
        ids = self._ids
        for _ in range(_LATEST_PLACES):
            if place == 0:
                break
            if place not in known:
                # Most are not longer, and measuring them all takes time.
                longer = place > 1 and len(recent) > 1 and ids[place - 2] == recent[-2]
                found.append((self._length(place, recent) if longer else 1, place))
            place = self._before[place - 1]
        return sorted(found, reverse=True)[: 2 * _LATEST_PLACES]

    def _length(self, place: int, recent: Sequence[int]) -> int:
        """Returns how many of the last of `recent` tokens occur before a place, of which the last one does."""
        ids, length = self._ids, 1
        while length < min(place, len(recent)) and ids[place - 1 - length] == recent[-1 - length]:
            length += 1
        return length
