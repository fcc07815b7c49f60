"""Divides rows into passes of a few static shapes, and writes each pass as one message of integers.

A Gaudi compiles each new shape for seconds, so no shape may depend on a text. Here, a pass has one of a few widths (its
tokens, padded), reads one of a few lengths of the cache, and returns one of a few numbers of logits. Tokens of all rows
are concatenated. Where they belong (slot, position) is data, and so is what they may attend to.

Cells are positions of the cache tensor: slot `s` keeps its token `p` in cell `p * slot_count + s`, so that the first
tokens of all slots are adjacent. Padding writes to cells after those of all slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from services.engines.engine import Row, sample_ids

# Numbers of tokens of passes that decode or verify; prompts have `bucket_size` tokens times a power of two.
_NARROW_WIDTHS = (1, 4, 8, 16, 32, 64)
MAX_WIDTH = 512
MAX_LOGITS = 64
# Numbers at the start of a message: kind, width, length, whether one slot is read alone, this slot, another slot.
_HEADER_SIZE = 6
MESSAGE_SIZE = _HEADER_SIZE + 4 * MAX_WIDTH + MAX_LOGITS

Message = NDArray[np.int64]


class Kind(IntEnum):
    """What a message asks a process of the engine to do."""

    PASS = 0
    COPY = 1
    STOP = 2


@dataclass(frozen=True)
class Shape:
    """The shape of a pass: `width` tokens attend to the first `length` tokens of one slot (`alone`) or of all slots."""

    width: int
    length: int
    alone: bool

    @property
    def logit_count(self) -> int:
        """The number of tokens that have logits."""
        return min(self.width, MAX_LOGITS)


class Shapes:
    """All shapes of an engine with `slot_count` slots of `capacity` tokens.

    `bucket_size`: the width of the narrowest prompt pass. `bucketed`: attention reads `bucket_size` tokens times a
    power of two instead of whole slots, which is faster for short texts and takes longer to warm up.
    """

    def __init__(self, slot_count: int, capacity: int, bucket_size: int, bucketed: bool) -> None:
        self.slot_count, self.capacity = slot_count, capacity
        wide = tuple(_doubled(bucket_size, min(MAX_WIDTH, capacity)))
        self.widths = (*(width for width in _NARROW_WIDTHS if width < wide[0]), *wide)
        self.lengths = tuple(_doubled(bucket_size, capacity)) if bucketed else (capacity,)
        self._prompt_width = wide[0]

    @property
    def cell_count(self) -> int:
        """The size of the cache tensor of a layer, in tokens."""
        return self.slot_count * self.capacity + self.widths[-1]

    def is_prompt(self, shape: Shape) -> bool:
        """Whether a pass of this shape is wider than those that decode or verify."""
        return shape.width >= self._prompt_width

    def all(self) -> list[Shape]:
        """Returns every shape that `passes` can yield."""
        lone = [Shape(width, length, True) for width in self.widths for length in self.lengths]
        # Tokens of two slots are at least two.
        several = [Shape(one.width, one.length, False) for one in lone if self.slot_count > 1 and one.width > 1]
        return [shape for shape in lone + several if self._fits(shape)]

    def example(self, shape: Shape, vocabulary_size: int) -> list[Row]:
        """Returns rows of one of the shapes."""
        left = self._least(shape.width) if shape.alone else max(self._least(shape.width), 2)
        count = left if shape.alone else min(left - 1, shape.length)
        shorter = self.lengths.index(shape.length)
        end = max(count, self.lengths[shorter - 1] + 1 if shorter else 1)
        ids = sample_ids(shape.width, vocabulary_size)
        rows = [Row(0, end - count, ids[:count], count - 1)]
        while left := left - count:
            count = min(left, shape.length)
            rows.append(Row(len(rows), 0, ids[:count], count))
        return rows

    def _fits(self, shape: Shape) -> bool:
        """Whether a pass is at most as wide as what it reads: optimum-habana's attention would cut masks otherwise."""
        return shape.width <= shape.length * (1 if shape.alone else self.slot_count)

    def _least(self, width: int) -> int:
        """Returns the smallest number of tokens that needs this width."""
        index = self.widths.index(width)
        return self.widths[index - 1] + 1 if index else 1

    def passes(self, rows: Sequence[Row]) -> Iterator[tuple[Shape, Message, int]]:
        """Yields the passes that run all rows: the shape, the message, the number of logits that rows want.

        The logits of all passes, concatenated, are those of the rows, concatenated.
        """
        tokens = np.concatenate([self._tokens(row) for row in rows], axis=1)
        wanted = np.concatenate([np.arange(len(row.token_ids)) >= row.logits_from for row in rows])
        start = 0
        while start < tokens.shape[1]:
            end = min(start + self.widths[-1], tokens.shape[1])
            # A pass ends before the first wanted token that would be too many.
            beyond = np.flatnonzero(wanted[start:end])[min(self.widths[-1], MAX_LOGITS) :]
            end = start + int(beyond[0]) if len(beyond) else end
            yield self._pass(tokens[:, start:end], np.flatnonzero(wanted[start:end]))
            start = end

    def copying(self, source: int, target: int, token_count: int) -> Message:
        """Returns the message that copies the first tokens of a slot, at least `token_count`."""
        length = next(length for length in self.lengths if length >= token_count)
        return _message(Kind.COPY, 0, length, 0, source, target)

    def _tokens(self, row: Row) -> NDArray[np.int64]:
        """Returns [4, tokens]: ids, slots, positions and cells."""
        count = len(row.token_ids)
        positions = np.arange(row.keep, row.keep + count)
        slots = np.full(count, row.slot)
        return np.stack([np.array(row.token_ids), slots, positions, positions * self.slot_count + row.slot])

    def _pass(self, tokens: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[Shape, Message, int]:
        count = tokens.shape[1]
        alone = self.slot_count == 1 or bool((tokens[1] == tokens[1, 0]).all())
        width = next(width for width in self.widths if width >= count)
        shapes = (Shape(width, length, alone) for length in self.lengths if length > tokens[2].max())
        shape = next(filter(self._fits, shapes))
        message = _message(Kind.PASS, width, shape.length, int(alone), int(tokens[1, 0]), 0)
        inputs, logits = inputs_of(message, shape)
        inputs[:, :count] = tokens
        # Padding has no effect on logits, but on the values that FP8 measures, so it repeats an id of the text.
        inputs[0, count:] = tokens[0, 0]
        inputs[3, count:] = self.slot_count * self.capacity + np.arange(count, width)
        logits[: len(wanted)] = wanted
        return shape, message, len(wanted)


def shape_of(message: Message) -> Shape:
    """Returns the shape of a pass."""
    return Shape(int(message[1]), int(message[2]), bool(message[3]))


def slots_of(message: Message) -> Message:
    """Returns [2]: the slot that a pass reads alone, or the source of a copy; the target of a copy."""
    return message[4:_HEADER_SIZE]


def inputs_of(message: Message, shape: Shape) -> tuple[Message, Message]:
    """Returns two views of a pass: its tokens [4, width], and the indices of those with logits [logit_count]."""
    end = _HEADER_SIZE + 4 * shape.width
    return message[_HEADER_SIZE:end].reshape(4, shape.width), message[end : end + shape.logit_count]


def stopping() -> Message:
    """Returns the message that ends a process."""
    return _message(Kind.STOP, 0, 0, 0, 0, 0)


def _message(*header: int) -> Message:
    message = np.zeros(MESSAGE_SIZE, np.int64)
    message[:_HEADER_SIZE] = header
    return message


def _doubled(first: int, last: int) -> Iterator[int]:
    """Yields `first` times 1, 2, 4, ... below `last`, then `last`."""
    while first < last:
        yield first
        first *= 2
    yield last
