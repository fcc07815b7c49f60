"""Batch-invariant forwards: logits depend on the text alone, bit for bit, not on what else is in the forward.

* A forward has one of a few numbers of tokens: they are padded to it, as are those whose logits are wanted. More are
  divided among several forwards. Torch divides the elements of an activation among its threads in a different way for
  each number of tokens, and the last elements of a thread's share may round differently.
* Products with packed weights have at most 64 rows, or 32 (bfloat16 with AMX): oneDNN rounds each row alike up to that.
* Attention runs in blocks of positions that begin at multiples of their size, with the cache ending at a multiple of a
  larger one: the same shape for a position in every forward. Blocks that end there together are a batch.
* Everything else in a model treats each token separately, except experts: models that have some are not run so.

`make_invariant` checks this on the model at start, with each number of tokens, because libraries differ by processor.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch.nn.functional import pad

from services.engines.engine import Row, sample_ids
from services.engines.torch.attention import Scoring
from services.engines.torch.cache import SlotCaches, attention, branched, causal_mask
from services.engines.torch.packed import PackedLinear

# The numbers of tokens of a forward. One or two take no less time than four; with AVX-512 six do not take more either,
# and seven or eight take a fifth more. A prompt of 512 takes 3% to 10% longer in four forwards than in one.
SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# The most rows of a product: the first number with which most numbers of tokens agree.
_LIMITS = (64, 32)
# Positions of a block of attention, and of the span of blocks whose end is where a block's keys end. More of either
# computes more padding, fewer take more calls. A slot holds a multiple of a span.
_BLOCK, SPAN = 4, 64
# Tokens before those whose logits are compared: more than 512, whose keys torch's attention treats as a group. They are
# the first ones of these, again and again.
_COMPARED_AFTER, _REPEATED = 576, 16
# The most tokens are compared with forwards of this many: first token and number of tokens, in an order in which none
# needs what an earlier one cleared. They have all sizes, and few of them begin where a block does.
_REFERENCE = 32
_COMPARED = SIZES[-1]
_PARTS = ((124, 4), (101, 6), (95, 8), (81, 12), (62, 16), (40, 24), (31, 48), (5, 64), (3, 96), (0, 128))

# The rows and branches of a forward.
Part: TypeAlias = tuple[list[Row], Sequence[tuple[int, int]]]


def size_of(count: int) -> int:
    """Returns the number of tokens that `count` of them are padded to."""
    return next(size for size in SIZES if size >= count)


def divided(rows: Sequence[Row], branches: Sequence[tuple[int, int]], limit: int) -> list[Part]:
    """Returns the rows and branches of forwards of at most `limit` tokens, in order, that compute the same as one.

    Branches are of a single row. If they do not fit into its last forward, they follow its last token, which runs
    again.
    """
    parts, room = [list[Row]()], limit
    for row in rows:
        start = 0
        while start < len(row.token_ids):
            if not room:
                parts.append([])
                room = limit
            ids = row.token_ids[start : start + room]
            wanted = min(max(row.logits_from - start, 0), len(ids))
            parts[-1].append(Row(row.slot, row.keep + start, ids, wanted))
            start, room = start + len(ids), room - len(ids)
    found: list[Part] = [(part, ()) for part in parts]
    if branches and len(branches) <= room:
        found[-1] = parts[-1], _after(parts[-1][0], rows[0], branches)
    elif branches:
        last = Row(rows[0].slot, rows[0].keep + len(rows[0].token_ids) - 1, rows[0].token_ids[-1:], 1)
        own = _after(last, rows[0], branches)
        found += [([last], own[at : at + limit - 1]) for at in range(0, len(own), limit - 1)]
    return found


def _after(part: Row, row: Row, branches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns a row's branches with indices into one of its parts: those before it are negative."""
    return [(index - (part.keep - row.keep), id_) for index, id_ in branches]


def padded(indices: Sequence[int], size: int) -> list[int]:
    """Returns the indices, with the last one repeated up to `size` of them."""
    return [*indices, *[indices[-1]] * (size - len(indices))]


def _span_end(row: Row) -> int:
    return -(-(row.keep + len(row.token_ids)) // SPAN) * SPAN


class BlockBatch:
    """Attention for one forward, in blocks. Tokens after those of the rows and `branches` are padding."""

    def __init__(self, caches: SlotCaches, rows: Sequence[Row], branches: Sequence[tuple[int, int]] = ()) -> None:
        self._caches, self._rows, self._branches = caches, rows, branches
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See `Attention.attend`. Writes the new keys and values into the slots, and reads all from there."""
        keys, values = self._caches.layer(layer, key, value)
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        start = 0
        for row in self._rows:
            end = row.keep + len(row.token_ids)
            for held, new in ((keys, key), (values, value)):
                held[row.slot, :, row.keep : end] = new[0, :, start : start + len(row.token_ids)]
                # The mask hides what lies there, but a NaN would spread even with a weight of 0.
                held[row.slot, :, end : _span_end(row)] = 0
            for span in range(row.keep // SPAN * SPAN, end, SPAN):
                low, high = max(span, row.keep), min(span + SPAN, end)
                own = slice(start + low - row.keep, start + high - row.keep)
                out[0, own] = self._attend(query[0, :, own], (keys, values), row.slot, low, scoring)
            start += len(row.token_ids)
        for token, (index, _) in enumerate(self._branches, start):
            slot, position = self._rows[0].slot, self._rows[0].keep + index
            with branched((keys, values), (key, value), slot, position, token):
                own = slice(token, token + 1)
                out[0, own] = self._attend(query[0, :, own], (keys, values), slot, position, scoring)
        return out

    def _attend(
        self,
        query: torch.Tensor,
        held: tuple[torch.Tensor, torch.Tensor],
        slot: int,
        low: int,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Returns attention [tokens, heads, size] of query [heads, tokens, size] from position `low` on, in one span.

        `held`: keys and values of all slots. Attention reads them up to where the span ends.
        """
        heads, count, size = query.shape
        span = low // SPAN * SPAN
        first = max(0, span + 1 - scoring.window) if scoring.window else 0
        keys, values = (one[slot, :, first : span + SPAN] for one in held)
        begin = low // _BLOCK * _BLOCK
        blocks = -(-(low + count - begin) // _BLOCK)
        filled = pad(query, (0, 0, low - begin, begin + blocks * _BLOCK - low - count))
        queries = filled.reshape(heads, blocks, _BLOCK, size).transpose(0, 1).contiguous()
        masks = self._masks_of(query, heads // keys.shape[0], first, begin, blocks, span + SPAN, scoring.window)
        # A product of matrices, which is what attention with soft caps or sinks consists of, would copy shared keys.
        at_once = blocks if scoring.softcap is None and scoring.sinks is None else 1
        found = [
            attention(
                queries[at : at + at_once],
                keys.expand(at_once, -1, -1, -1),
                values.expand(at_once, -1, -1, -1),
                masks[at : at + at_once],
                scoring,
            )
            for at in range(0, blocks, at_once)
        ]
        return torch.cat(found).reshape(blocks * _BLOCK, heads, -1)[low - begin : low - begin + count]

    def _masks_of(
        self, like: torch.Tensor, group: int, first: int, begin: int, blocks: int, last: int, window: int
    ) -> torch.Tensor:
        """Returns masks [blocks, 1, queries of all heads that share keys, keys from `first` to `last`]."""
        key = (group, first, begin, blocks, last, window)
        if key not in self._masks:
            mask = causal_mask(first, begin, begin + blocks * _BLOCK, window, like, last)
            self._masks[key] = mask.view(blocks, 1, _BLOCK, -1).repeat(1, 1, group, 1)
        return self._masks[key]


def routes_tokens(model: torch.nn.Module, token_count: int, forward: Callable[[], object]) -> bool:
    """Returns whether some of the model's layers get only some tokens of a forward, as experts do.

    `forward` runs the model on `token_count` tokens. Weights with three dimensions are those of several experts.
    """
    if any(len(one.shape) > 2 for one in model.parameters()):
        return True
    counts = set[int]()
    with _row_counts(model, counts):
        forward()
    return bool(counts - {token_count})


@contextmanager
def _row_counts(model: torch.nn.Module, counts: set[int]) -> Iterator[None]:
    """Adds the numbers of rows that the model's products with weights get to `counts`."""

    def count(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        counts.add(given[0].numel() // given[0].shape[-1])

    kinds = (PackedLinear, torch.nn.Linear)
    hooks = [part.register_forward_pre_hook(count) for part in model.modules() if isinstance(part, kinds)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def make_invariant(
    model: torch.nn.Module,
    caches: SlotCaches,
    context_length: int,
    forward: Callable[[Row], torch.Tensor],
    vocabulary_size: int,
) -> int:
    """Limits the rows of products so that a position's logits are the same bit for bit in each forward.

    Returns the most tokens of a forward, 32 to 128, or 0 if logits would differ nevertheless. `forward` runs one row
    and returns its logits. Overwrites slot 0. Models in which a packed layer gets only some tokens, as experts do, are
    refused: its numbers of rows would not be those that are compared. What is compared are a few positions after 576
    others at most, so windows larger than that and longer texts are taken on trust.
    """
    limit_rows(model, None)
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    if any(len(one.shape) > 1 and id(one) not in looked_up for one in model.parameters()):
        return 0  # a product with weights that are not packed
    counts = set[int]()
    ids = sample_ids(_COMPARED, vocabulary_size)
    keep = min(_COMPARED_AFTER, (context_length - _COMPARED) // SPAN * SPAN)

    def agreeing(limit: int) -> int:
        """Returns the number of tokens up to which all numbers agree, or 0 if it is less than 32."""
        limit_rows(model, limit)

        def logits(start: int, size: int) -> torch.Tensor:
            """Returns the logits of some tokens, empty if a product got another number of rows."""
            counts.clear()
            found = forward(Row(0, keep + start, ids[start : start + size], 0)).clone()
            return found if counts == {size} else found[:0]

        forward(Row(0, 0, ids[:_REPEATED], _REPEATED))
        caches.repeat(0, _REPEATED, keep)
        whole = torch.cat([logits(start, _REFERENCE) for start in range(0, _COMPARED, _REFERENCE)])
        for start, size in _PARTS:
            if not torch.equal(logits(start, size), whole[start : start + size]):
                return SIZES[SIZES.index(size) - 1] if size > _REFERENCE else 0
        return _COMPARED

    most, rows = 0, None
    with _row_counts(model, counts):
        for limit in _LIMITS:
            if most < _COMPARED and (found := agreeing(limit)) > most:
                most, rows = found, limit
    limit_rows(model, rows)
    return most


def limit_rows(model: torch.nn.Module, limit: int | None) -> None:
    """Sets the most rows of one product in packed layers; None for no limit."""
    for part in model.modules():
        if isinstance(part, PackedLinear):
            part.row_limit = limit
