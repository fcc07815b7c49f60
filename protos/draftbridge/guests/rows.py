"""Recognises the sequences of an engine that names only the rows of its batch, which change owner between steps.

Rows are swapped, filled again when a request ends, and lost and found when one is preempted. A row belongs to a known
sequence if its tokens continue those of the sequence; otherwise it starts a new one. A sequence that is mistaken for
another with the same recent tokens gets worse candidates, never another text.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The number of tokens, up to the end of a known sequence, that are compared. Two sequences of the same length that
# agree on all of these but not before are rare.
_COMPARED_TOKENS = 4096
# The tokens that a row may always gain without a report: the engine skipped steps, or a prompt continues an ended text.
_MISSED_TOKENS = 16
# A sequence ends when no row had it for this many steps: until then, it may return from a preemption.
_KEPT_STEPS = 32
# The room for new tokens in the copy of a sequence, so that it is not copied again for every token.
_SPARE_TOKENS = 256


@dataclass(eq=False)
class RowSequence:
    """A sequence, found in a row.

    `read_prompt`: the step may have read its tokens, or a part of them, again or for the first time, because it is new,
    was preempted, or has tokens that no step reported. `is_reading`: it gained nothing in its last step, which read a
    part of its prompt.
    """

    id: int
    read_prompt: bool
    count: int
    prompt_count: int
    last_step: int
    _tokens: Any
    is_reading: bool = False

    def continues_in(self, row: Any) -> bool:
        """Returns whether the first tokens of a row are this sequence's."""
        last, first = self.count - 1, max(self.count - _COMPARED_TOKENS, 0)
        if row[last] != self._tokens[last]:
            return False
        return bool((row[first : self.count] == self._tokens[first : self.count]).all())

    def grow(self, row: Any, count: int, step: int) -> None:
        """Takes over the row's first `count` tokens after a step."""
        if count > len(self._tokens):
            self._tokens = row[: count + max(count // 2, _SPARE_TOKENS)].copy()
        else:
            self._tokens[self.count : count] = row[self.count : count]
        self.count, self.last_step = count, step


class Rows:
    """Follows the rows of one engine. Tokens are rows of a 2-D array of ids, of which only the first ones count.

    `stages`: the stages of the engine's pipeline. As many batches take turns, and each has other sequences.
    `missed_tokens`: the most that a row may gain in steps that the engine skips.
    """

    def __init__(self, stages: int = 1, missed_tokens: int = 0) -> None:
        self._stages, self._missed_tokens = stages, max(missed_tokens, _MISSED_TOKENS)
        self._numbers = itertools.count(1)
        self._step = 0
        self._rows: list[RowSequence] = []
        self._known: dict[int, RowSequence] = {}

    def follow(self, gained: Sequence[int], counts: Sequence[int], tokens: Any) -> list[RowSequence]:
        """Returns the sequence of each row after a step.

        `gained`: the tokens that each row gained in this step. `counts`: the number of its tokens, at least 1.
        """
        self._step += 1
        found: list[RowSequence | None] = [
            self._at_home(place, count - new, tokens[place])
            for place, (new, count) in enumerate(zip(gained, counts, strict=True))
        ]
        if None in found:
            self._find_elsewhere(found, gained, counts, tokens)
        rows = []
        for place, (sequence, new, count) in enumerate(zip(found, gained, counts, strict=True)):
            if sequence:
                was_away = self._step - sequence.last_step > self._stages or count - new > sequence.count
                sequence.read_prompt = was_away or sequence.is_reading
                sequence.grow(tokens[place], count, self._step)
            else:
                sequence = self._start(tokens[place], count, count - new)
            sequence.is_reading = not new
            rows.append(sequence)
        self._rows = rows
        return rows

    def ended(self) -> list[int]:
        """Returns, once, the ids of sequences that no row has had for many steps."""
        if len(self._known) == len(self._rows):
            return []
        gone = [one.id for one in self._known.values() if self._step - one.last_step > _KEPT_STEPS]
        for id_ in gone:
            del self._known[id_]
        return gone

    def _at_home(self, place: int, before: int, row: Any) -> RowSequence | None:
        """Returns the sequence that the row had, if it still has it."""
        if place >= len(self._rows):
            return None
        old = self._rows[place]
        return old if 0 <= before - old.count <= self._missed_tokens and old.continues_in(row) else None

    def _find_elsewhere(
        self, found: list[RowSequence | None], gained: Sequence[int], counts: Sequence[int], tokens: Any
    ) -> None:
        """Finds the sequences of rows that have not kept theirs.

        One that had another row in the last step may have gained tokens without a report: the engine moves rows when a
        request ends, also in the steps that it skips.
        """
        taken = {id(one) for one in found if one}
        free: defaultdict[int, list[RowSequence]] = defaultdict(list)
        for one in self._known.values():
            if id(one) not in taken:
                free[one.count].append(one)
        lost = [place for place, sequence in enumerate(found) if sequence is None]
        for missed in range(self._missed_tokens + 1):
            for place in lost:
                choices = free.get(counts[place] - gained[place] - missed)
                if found[place] or not choices:
                    continue
                for one in choices:
                    if (not missed or self._step - one.last_step <= self._stages) and one.continues_in(tokens[place]):
                        choices.remove(one)
                        found[place] = one
                        break

    def _start(self, row: Any, count: int, prompt_count: int) -> RowSequence:
        copy = row[: count + _SPARE_TOKENS].copy()
        sequence = RowSequence(next(self._numbers), True, count, prompt_count, self._step, copy)
        self._known[sequence.id] = sequence
        return sequence
