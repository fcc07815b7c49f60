"""A draft service without a model: its tokens are bytes, and it proposes what followed an earlier match of the text."""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bridge.ports import Proposal
from bridge.text.models import Model
from bridge.text.vocabulary import Vocabulary
from services.errors import SlotsExhausted
from services.model.draft.credit import CreditedSession
from services.model.draft.suffix_index import SuffixMatcher

# The most bytes that a `SuffixMatcher` indexes.
_CONTEXT_BYTES = 1 << 20
# Indexing or removing this many bytes takes long enough to delay other requests, so it is done in a thread.
_THREAD_MIN_BYTES = 1 << 14


class SuffixModel:
    """The model and sessions of a suffix server. At most `slot_count` sessions may hold a text at once."""

    def __init__(self, name: str, slot_count: int) -> None:
        self.tokenizer_json = _tokenizer_json()
        vocabulary = Vocabulary(self.tokenizer_json)
        self.model = Model(name, _CONTEXT_BYTES, vocabulary.size, vocabulary)
        self.slot_count = slot_count
        self._taken_count = 0

    def open(self) -> "SuffixSession":
        """Opens a session. Its `proposals` raises `SlotsExhausted` if all slots are in use."""
        return SuffixSession(self.model, self._take, self._give_back)

    def _take(self) -> None:
        if self._taken_count == self.slot_count:
            raise SlotsExhausted(self.slot_count)
        self._taken_count += 1

    def _give_back(self) -> None:
        self._taken_count -= 1


class SuffixSession(CreditedSession):
    """Implements `bridge.ports.Drafter`: proposes, in each epoch, what followed the longest match of the text's end.

    It is done if there is no match, or after the end of what followed. It reports no confidence.
    """

    def __init__(
        self, model: Model, take: Callable[[], None] = lambda: None, give_back: Callable[[], None] = lambda: None
    ) -> None:
        """Calls `take` when the session gets its first text, and `give_back` when it is closed."""
        super().__init__(model)
        self._take, self._give_back = take, give_back
        self._holds = False
        self._drafter = SuffixMatcher(limit=model.context_length)
        # The whole sequence, and how much of it the drafter has indexed. Proposed bytes are not indexed before a sync.
        self._text = bytearray()
        self._known = 0
        # What this epoch has still to propose; None until a match was searched for.
        self._ahead: bytes | None = None

    def close(self) -> None:
        """Frees the slot."""
        if self._holds:
            self._holds = False
            self._give_back()

    @property
    def _held(self) -> int:
        return len(self._text)

    def _replace(self, keep: int, token_ids: Sequence[int], byte_offset: int) -> None:
        if not self._holds:
            self._take()
            self._holds = True
        self._text[keep:] = bytes(token_ids)
        self._known = min(self._known, keep)
        self._ahead = None

    async def _propose(self) -> Proposal:
        started = perf_counter_ns()
        if self._ahead is None:
            await self._learn()
            match = self._drafter.match()
            self._ahead = match.data if match else b""
        count = min(self._credit, self._model.context_length - self._held)
        proposed, self._ahead = self._ahead[:count], self._ahead[count:]
        self._text += proposed
        return Proposal(
            self._epoch,
            tuple(proposed),
            (),
            done=not self._ahead,
            forward_ns=perf_counter_ns() - started,
            read_token_count=1,
        )

    async def _learn(self) -> None:
        """Indexes the rest of the sequence. Each byte is indexed once and removed at most once."""
        known, news = self._known, self._text[self._known :]
        self._known = len(self._text)
        # Cutting and indexing take constant time per byte.
        if len(self._drafter) - known + len(news) < _THREAD_MIN_BYTES:
            self._index(known, news)
        else:
            await asyncio.to_thread(self._index, known, news)

    def _index(self, known: int, news: bytes | bytearray) -> None:
        self._drafter.cut(known)
        self._drafter.append(news)


def _tokenizer_json() -> bytes:
    """Returns a tokenizer with a token for each byte, whose id is the byte."""
    # ByteLevel writes most Latin-1 bytes as themselves and the others, in order, as the characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter([byte for byte in range(256) if chr(byte) not in alphabet])
    ids = {char: ord(char) if ord(char) < 256 else next(others) for char in alphabet}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text.encode()
