"""The tokenizers that engines send to `CandidateService`, within limits on time and memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bridge.errors import ProtocolViolation, TokenizerNotUnderstood
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import candidate_pb2, model_pb2
from services.bridge.endpoint import ModelReader
from services.errors import ChecksumMismatch, TokenizersFull

# How long a tokenizer may take to arrive. The largest published ones have 33 MB.
ARRIVAL_SECONDS = 60.0
# Bytes of memory for each byte of a tokenizer.json: 13 to 15 for published ones.
_MEMORY_PER_BYTE = 16


@dataclass
class _Kept:
    """A tokenizer, and the number of engines that use it."""

    vocabulary: Vocabulary
    file_bytes: int
    user_count: int = 0

    @property
    def memory_bytes(self) -> int:
        """Returns the estimated memory of the tokenizer and of the prompts that were encoded with it."""
        return _MEMORY_PER_BYTE * self.file_bytes + self.vocabulary.prefixes.held_byte_count


class GuestTokenizers:
    """Receives and reads one tokenizer at a time, and keeps those in use and, as far as memory allows, recent ones.

    A lock and a cache apart from those for services, so that engines cannot delay a target. `memory_bytes`: estimated
    memory of all tokenizers that engines have sent.
    """

    def __init__(self, reader: ModelReader, memory_bytes: int) -> None:
        self._reader, self._memory_bytes, self._limit_bytes = reader, memory_bytes, memory_bytes // _MEMORY_PER_BYTE
        self._turn = asyncio.Lock()
        # The least recently used first.
        self._kept: dict[str, _Kept] = {}

    def find(self, sha256: str) -> Vocabulary | None:
        """Returns the tokenizer with this checksum, if a service or an engine has sent it."""
        kept = self._kept.get(sha256)
        return self._reader.vocabulary(sha256) or (kept.vocabulary if kept else None)

    @contextmanager
    def using(self, vocabulary: Vocabulary) -> Iterator[None]:
        """Keeps a tokenizer that `find` or `receive` has just returned for the duration of the block."""
        kept = self._kept.pop(vocabulary.sha256, None)
        if kept is None:
            yield
            return
        self._kept[vocabulary.sha256] = kept
        kept.user_count += 1
        try:
            yield
        finally:
            kept.user_count -= 1

    async def receive(
        self, requests: AsyncIterator[candidate_pb2.ProposeRequest], description: model_pb2.Model
    ) -> Vocabulary:
        """Returns the tokenizer that an engine sends in pieces; its stream is not read before its turn.

        Raises `ProtocolViolation`, `ChecksumMismatch`, `TokenizerNotUnderstood` or `TokenizersFull`.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(ARRIVAL_SECONDS):
                    data = await self._collect(requests)
            except TimeoutError:
                raise ProtocolViolation(
                    f"the tokenizer did not arrive within {ARRIVAL_SECONDS:g} s: send it without pauses"
                ) from None
            got = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
            if got != description.tokenizer_sha256:
                raise ChecksumMismatch(
                    f"the engine sent a tokenizer with SHA-256 {got} and named {description.tokenizer_sha256}: send "
                    "the file that it uses, and name that",
                    expected=description.tokenizer_sha256,
                    got=got,
                )
            if known := self.find(got):  # another engine has sent it meanwhile
                return known
            self._make_room(len(data))
            vocabulary, _ = await self._reader.read_tokenizer(data, description, "the engine")
            self._kept[got] = _Kept(vocabulary, len(data))
            return vocabulary

    async def _collect(self, requests: AsyncIterator[candidate_pb2.ProposeRequest]) -> bytes:
        data = bytearray()
        async for request in requests:
            if request.WhichOneof("kind") != "tokenizer":
                raise ProtocolViolation("the bridge asked for the tokenizer: send it before the first step")
            data += request.tokenizer.chunk
            if len(data) > self._limit_bytes:
                raise TokenizerNotUnderstood(
                    f"the engine sends a tokenizer of more than {self._limit_bytes} bytes: start the bridge with a "
                    "larger --guest-memory",
                    component="file",
                )
            if request.tokenizer.last:
                return bytes(data)
        raise ProtocolViolation("the stream ended in the middle of the tokenizer")

    def _make_room(self, file_bytes: int) -> None:
        """Forgets tokenizers that no engine uses, the least recently used first. Raises `TokenizersFull`."""
        wanted = _MEMORY_PER_BYTE * file_bytes
        while sum(one.memory_bytes for one in self._kept.values()) + wanted > self._memory_bytes:
            unused = next((sha256 for sha256, one in self._kept.items() if not one.user_count), None)
            if unused is None:
                raise TokenizersFull(self._limit_bytes)
            del self._kept[unused]
