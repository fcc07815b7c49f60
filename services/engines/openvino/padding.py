"""Pads a forward to the number of tokens of the one before, where that costs less than a change of the number.

OpenVINO prepares every node again whenever the number of tokens changes. On two Xeon cores with AMX that cost 5 to 8 ms
on SmolLM2-135M and Gemma-3-270M, and one more token 0.2 to 0.7 ms. On two EPYC cores with AVX2 only and int8 weights it
cost 3 to 6 ms, and one more token 3 ms on SmolLM2-135M, 5 ms on Gemma-3-270M, 20 ms on Qwen2.5-Coder-1.5B. So both are
measured.
"""

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from services.engines.engine import Engine, Row, sample_ids

# The numbers of tokens of the forwards that are timed, for this long, in at least two rounds and at most five.
_NARROW, _WIDE = 1, 5
_MEASURING_NS, _MIN_ROUNDS, _MAX_ROUNDS = 1_000_000_000, 2, 5
# The largest budget, in tokens.
_MAX_BUDGET = 48


class Padding:
    """Remembers the last forward, to decide how many tokens the next one gets in addition.

    `budget`: how many padding tokens, summed over forwards, cost about the same as one change of the number of tokens.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        # The last forward's rows by slot, and its tokens; the padding since a forward had this number without any.
        self._rows: dict[int, Row] = {}
        self._size = self._filled = 0

    def pad(self, rows: Sequence[Row], context_length: int) -> int:
        """Records the next forward. Returns how many tokens to append to its last row; the one after must drop them.

        A forward with fewer tokens than the last one is padded to its number until the budget is used up. Only if all
        rows continue those of the last forward: the logits of a sequence must not depend on others that ran before it.
        """
        # A forward with a prompt does not count as the last one.
        before, self._rows = self._rows, {} if any(row.logits_from for row in rows) else {row.slot: row for row in rows}
        size, last = sum(len(row.token_ids) for row in rows), rows[-1]
        missing = self._size - size
        goes_on = len(before) == len(rows) and all(
            (old := before.get(row.slot)) and old.keep < row.keep <= old.keep + len(old.token_ids) for row in rows
        )
        fits = last.keep + len(last.token_ids) + missing <= context_length
        if goes_on and fits and 0 < missing <= self._budget - self._filled:
            self._filled += missing
            return missing
        self._size, self._filled = size, 0
        return 0


def measured_budget(engine: Engine, clock_ns: Callable[[], int] = perf_counter_ns) -> int:
    """Returns the budget of `Padding`. Takes about a second; two seconds where a forward takes 200 ms."""
    fastest_ns: dict[tuple[int, bool], int] = {}  # by number of tokens, and whether it was that of the forward before
    stop_ns = clock_ns() + _MEASURING_NS
    for done in range(_MAX_ROUNDS):
        if done >= _MIN_ROUNDS and clock_ns() > stop_ns:
            break
        for width in (_NARROW, _WIDE):
            for same in (False, True):
                row = Row(0, 0, sample_ids(width, engine.vocabulary_size), width - 1)
                started = clock_ns()
                engine.forward([row])
                taken_ns = clock_ns() - started
                if done or same:  # the first forward of a number is slower, whatever came before it
                    fastest_ns[width, same] = min(fastest_ns.get((width, same), taken_ns), taken_ns)
    # Where forwards are slow, each change is timed once, so the smaller difference counts: other work disturbs few.
    change_ns = min(fastest_ns[width, False] - fastest_ns[width, True] for width in (_NARROW, _WIDE))
    token_ns = max((fastest_ns[_WIDE, True] - fastest_ns[_NARROW, True]) / (_WIDE - _NARROW), 1.0)
    return min(max(int(change_ns / token_ns), 0), _MAX_BUDGET)
