"""Sequences are recognised in a batch whose rows are swapped, filled again, preempted and read in chunks."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftbridge.guests import rows as rows_module
from draftbridge.guests.rows import Rows

WIDTH = 64


@dataclass
class Batch:
    """An engine's batch that knows which request each row belongs to, as vLLM's does and its proposer does not."""

    requests: list[int] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    tokens: np.ndarray = field(default_factory=lambda: np.full((8, WIDTH), -1, dtype=np.int32))

    def step(self, gains: list[int], draw: st.DataObject) -> list[int]:
        """Adds `gains` tokens to the rows, and returns the number of tokens of each row."""
        for place, (request, gain) in enumerate(zip(self.requests, gains, strict=True)):
            self.texts[request] += [draw.draw(st.integers(0, 2)) for _ in range(gain)]
            text = self.texts[request]
            # Other requests and rejected candidates leave ids after the tokens of a row.
            self.tokens[place] = draw.draw(st.integers(0, 2))
            self.tokens[place, : len(text)] = text
        return [len(self.texts[request]) for request in self.requests]


@given(st.data())
def test_a_sequence_has_one_id_and_its_own_tokens(data: st.DataObject) -> None:
    batch, rows = Batch(), Rows()
    ids: dict[int, set[int]] = {}
    seen: dict[int, list[int]] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 15))):
        kept = data.draw(st.permutations(batch.requests))[: data.draw(st.integers(0, 4))]
        batch.requests = list(kept)
        fresh = [(number := number + 1) for _ in range(data.draw(st.integers(0, 4 - len(kept)))) if number < 12]
        for request in fresh:
            # The number of the request in the prompt makes it different from all others.
            batch.texts[request] = [100 + request, *data.draw(st.lists(st.integers(0, 2), max_size=4))]
            batch.requests.append(request)
        gains = [data.draw(st.integers(0, 3)) for _ in batch.requests]
        counts = batch.step(gains, data)
        if not counts:
            continue
        found = rows.follow(gains, counts, batch.tokens)
        assert len({one.id for one in found}) == len(found)
        for request, one, gain in zip(batch.requests, found, gains, strict=True):
            text = batch.texts[request]
            assert one.count == len(text)
            if one.id in seen:
                # The row continues the tokens that the bridge holds for this id.
                assert text[: len(seen[one.id])] == seen[one.id]
            else:
                assert one.prompt_count == len(text) - gain
            seen[one.id] = list(text)
            ids.setdefault(request, set()).add(one.id)
        for ended in rows.ended():
            seen.pop(ended)
    # A request that leaves the batch and returns within the run keeps its id: nothing is sent twice.
    assert all(len(found_ids) == 1 for found_ids in ids.values())


def test_a_row_that_another_request_takes_over_is_a_new_sequence() -> None:
    rows, tokens = Rows(), np.zeros((1, WIDTH), dtype=np.int32)
    tokens[0, :4] = [1, 2, 3, 4]
    first = rows.follow([1], [4], tokens)[0].id
    tokens[0, :6] = [1, 2, 9, 4, 5, 6]
    (taken,) = rows.follow([1], [6], tokens)
    assert taken.id != first and taken.prompt_count == 5


def test_a_prompt_that_continues_an_ended_text_is_a_new_sequence() -> None:
    rows, tokens = Rows(), np.arange(2 * WIDTH, dtype=np.int32).reshape(2, WIDTH)
    first = rows.follow([1], [10], tokens)[0].id
    (next_turn,) = rows.follow([1], [10 + rows_module._MISSED_TOKENS + 2], tokens)
    assert next_turn.id != first


def test_steps_that_the_engine_skipped_are_caught_up() -> None:
    rows, tokens = Rows(), np.arange(2 * WIDTH, dtype=np.int32).reshape(2, WIDTH)
    first = rows.follow([1], [10], tokens)[0].id
    (later,) = rows.follow([1], [15], tokens)
    assert later.id == first and later.count == 15
    assert later.read_prompt, "perhaps a short prompt that continues an ended text"
    assert not rows.follow([1], [16], tokens)[0].read_prompt


def test_a_row_that_moved_while_the_engine_skipped_steps_is_found() -> None:
    rows, tokens = Rows(missed_tokens=24), np.arange(3 * WIDTH, dtype=np.int32).reshape(3, WIDTH)
    _, second, third = (one.id for one in rows.follow([1, 1, 1], [60, 10, 20], tokens))
    moved = tokens[[2, 1]]
    assert [one.id for one in rows.follow([1, 1], [45, 35], moved)] == [third, second]
    rows.follow([1], [46], moved)
    assert rows.follow([1, 1], [47, 40], moved)[1].id != second, "it was away before: its text may have ended"
    assert rows.follow([1, 1], [48 + 25, 41], moved)[0].id != third


def test_a_sequence_that_no_row_has_ends_once() -> None:
    rows, tokens = Rows(), np.arange(2 * WIDTH, dtype=np.int32).reshape(2, WIDTH)
    first, second = (one.id for one in rows.follow([1, 1], [10, 10], tokens))
    ended = []
    for count in range(11, 11 + rows_module._KEPT_STEPS + 5):
        (left,) = rows.follow([1], [count], tokens)
        assert left.id == first
        ended += rows.ended()
    assert ended == [second]


def test_a_sequence_longer_than_its_copy_grows() -> None:
    rows, tokens = Rows(), np.zeros((1, 4000), dtype=np.int32)
    tokens[0] = np.arange(4000)
    ids = {rows.follow([1 if count > 5 else 0], [count], tokens)[0].id for count in range(5, 3999, 11)}
    assert len(ids) == 1


def test_batches_that_take_turns_have_read_their_prompts_once() -> None:
    """As in the stages of a pipeline: the sequences of the other batch are not away."""
    rows, tokens = Rows(stages=2), np.zeros((1, WIDTH), dtype=np.int32)
    texts: list[list[int]] = [[1, 2, 3], [4, 5, 6, 7]]

    def step(number: int, gain: int) -> bool:
        text = texts[number]
        text += range(20, 20 + gain)
        tokens[0, : len(text)] = text
        (found,) = rows.follow([gain], [len(text)], tokens)
        assert found.id == number + 1
        return found.read_prompt

    assert [step(number, gain) for gain in (0, 0, 1, 1, 3, 1) for number in (0, 1)] == [True] * 6 + [False] * 6
    assert not step(0, 1) and not step(0, 1), "the other batch is empty"
    assert step(1, 1), "it was preempted, and read again"
