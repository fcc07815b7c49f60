"""What the draft has said beyond the committed text, and whether it still agrees with it."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable

from bridge.errors import ProtocolViolation
from bridge.models import Model
from bridge.ports import Proposal, Sync
from bridge.tape import Tape
from bridge.translation import DraftContext
from bridge.vocabulary import Rendering

# Bytes of a token, until the draft has said some.
_TOKEN_BYTES = 4.0


class Lead:
    """The draft as the bridge sees it: one epoch after the other, each beginning at agreed bytes.

    The draft's context always spells committed bytes; what it proposed since then is `said`. As long as
    what the target commits spells the same bytes, the draft is left to run. Where they part, or the
    target has overtaken it, `sync` tells it what to keep and what to append.
    """

    def __init__(self, model: Model, prompt: Rendering, confidence_threshold: float = 0.0) -> None:
        self._model = model
        self._prompt = prompt
        self._context = DraftContext(model.vocabulary, prompt)
        self._threshold = confidence_threshold
        self._appended = 0
        self._proposed: list[int] = []
        self._said = bytearray()
        self._ends: list[int] = []
        self._sure: list[float] = []
        self._agreed = 0
        self._parted = False
        self._said_bytes = self._said_tokens = 0
        self._base = 0
        self._credit = 0
        self.epoch = 0
        self.ended = False
        self.closed = True

    def sync(self, tape: Tape, credit: int) -> Sync | None:
        """Begins an epoch at the end of the tape, less half a character; None if that is nothing to continue."""
        keep, ids = self._context.append(tape.data[self._appended :], self._proposed)
        self._appended = len(tape.data)
        if not ids:
            return None
        if self.epoch == 0:
            keep, ids = 0, self._context.ids
        self._proposed.clear()
        self._said.clear()
        self._ends.clear()
        self._sure.clear()
        self._base = self._context.byte_offset
        self._agreed, self._parted = 0, False
        self._credit = credit
        self.epoch += 1
        self.ended = self.closed = False
        return Sync(self.epoch, keep, tuple(ids), max(self._base, 0), credit)

    def hear(self, proposal: Proposal) -> bool:
        """Takes a proposal; False if nothing came of it, because its epoch is over or the turn ended."""
        if proposal.epoch != self.epoch or self.closed:
            return False
        # A service may leave out how sure it is.
        confidences = proposal.confidence or (1.0,) * len(proposal.token_ids)
        if len(confidences) != len(proposal.token_ids):
            raise ProtocolViolation("a draft sends a confidence for each token, or none at all")
        for id_, confidence in zip(proposal.token_ids, confidences, strict=True):
            data = self._model.vocabulary.token_bytes(id_)
            self.ended = id_ in self._model.special_ids.eos
            if self.ended or not data:
                # A control token other than an end says nothing to another model.
                self.closed = True
                break
            self._proposed.append(id_)
            self._said += data
            self._said_bytes, self._said_tokens = self._said_bytes + len(data), self._said_tokens + 1
            self._ends.append(len(self._said))
            self._sure.append(confidence)
            if confidence < self._threshold:
                self.closed = True
                break
        self.closed |= proposal.done
        return True

    @property
    def turn_over(self) -> bool:
        """It has said all that its credit allows, or all that it has to say."""
        return self.closed or len(self._ends) >= self._credit

    def runs_on(self, tape: Tape, catches_up: Callable[[float], bool]) -> bool:
        """Whether what it says, or is about to say, is still of use; else it wants a new epoch.

        A draft that said just what was committed is left to run: its next token is under way. One that has fallen
        behind is left if it `catches_up` with about so many tokens before it could begin anew, in which a single
        forward would take it past everything committed.
        """
        if self._agrees(tape):
            return not (self.closed and self._agreed == len(self._said))
        return not (self._parted or self.closed) and catches_up(self._behind(tape))

    def ahead(self, tape: Tape) -> bytes:
        """What the draft said beyond the tape, as far as the two agree."""
        return bytes(self._said[self._agreed :]) if self._agrees(tape) else b""

    def confidences(self, lengths: Iterable[int]) -> list[float]:
        """The draft's probability of pieces of `ahead`, so many bytes each: of the tokens that begin in each.

        None of pieces that begin behind it.
        """
        place, end = bisect_right(self._ends, self._agreed), self._agreed
        found = []
        for length in lengths:
            if end >= len(self._said):
                break
            end, sure = end + length, 1.0
            while place < len(self._ends) and (self._ends[place - 1] if place else 0) < end:
                sure *= self._sure[place]
                place += 1
            found.append(sure)
        return found

    def grant(self, tape: Tape, tokens_ahead: int) -> int:
        """Credit to add so that the draft may get `tokens_ahead` beyond the tape."""
        reached = bisect_right(self._ends, self._agreed) if self._agrees(tape) else len(self._ends) + self._behind(tape)
        added = max(math.ceil(reached) + tokens_ahead - self._credit, 0)
        self._credit += added
        return added

    def _behind(self, tape: Tape) -> float:
        """How many of its tokens it is behind the tape, by how long they are on average."""
        length = self._said_bytes / self._said_tokens if self._said_tokens else _TOKEN_BYTES
        return max(len(tape.data) - self._base - len(self._said), 0) / length

    def _agrees(self, tape: Tape) -> bool:
        """Whether what it said begins with what was committed since this epoch began.

        Looks only at what was committed since the last look. An epoch can begin inside the prompt's last
        character, whose rest the draft says first.
        """
        start = self._base + self._agreed
        committed = self._prompt.text[start:] + bytes(tape.data) if start < 0 else bytes(tape.data[start:])
        if not self._parted and self._said.startswith(committed, self._agreed):
            self._agreed += len(committed)
            return True
        self._parted = self._parted or not committed.startswith(bytes(self._said[self._agreed :]))
        return False
