"""Gives llama-cpp-python candidates from a bridge: a `LlamaDraftModel`.

>>> from llama_cpp import Llama
>>> from draftbridge.guests.llama_cpp import BridgeDraftModel
>>> draft = BridgeDraftModel("localhost:50050", "tokenizer.json")
>>> llama = Llama("model.gguf", draft_model=draft, logits_all=True)

Without `logits_all`, llama-cpp-python 0.3 fails as soon as a text with a draft model has more than `n_batch` tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftbridge.candidates import SequenceStep
from draftbridge.guests.client import open_client
from draftbridge.machine import compute_units
from draftbridge.security import Credentials
from draftbridge.v1 import model_pb2

# Long enough for a draft to propose several tokens. The bridge waits only where it predicts a gain.
_DEADLINE_SECONDS = 0.25


class BridgeDraftModel:
    """Implements llama-cpp-python's `LlamaDraftModel` for one `Llama`, which verifies the candidates itself.

    `address`: the bridge's HOST:PORT, or "local" for candidates from what repeats in the text, without a bridge.
    `tokenizer_json`: the path of the model's `tokenizer.json`, or its content; its ids must be those of the GGUF file.
    `context_length`: that of the `Llama`. `eos`: the ids that end a text. `deadline`: the most seconds that a forward
    waits for candidates. `threads`: the threads of the `Llama`, by default one for each core. The other parameters are
    those of `CandidateClient`; `client.counts` shows what the bridge has answered. Raises `ValueError` for a file that
    is not a tokenizer.json, and for an address that is none.
    """

    def __init__(
        self,
        address: str,
        tokenizer_json: str | Path | bytes,
        *,
        name: str = "llama.cpp",
        context_length: int = 1 << 20,
        eos: Sequence[int] = (),
        chat_template: str = "",
        deadline: float = _DEADLINE_SECONDS,
        draft: str = "",
        sources: Sequence[str] = (),
        engine: str = "",
        threads: int | None = None,
        credentials: Credentials | None = None,
        connect_timeout: float = 10.0,
    ) -> None:
        content, id_count = _read(tokenizer_json)
        units, unit_count = compute_units("cpu", threads)
        description = model_pb2.Model(
            name=name,
            engine="llama.cpp",
            context_length=context_length,
            vocabulary_size=id_count,
            special_ids=model_pb2.SpecialIds(eos=eos),
            chat_template=chat_template,
            compute_units=sorted(units),
            compute_unit_count=unit_count,
        )
        self.client = open_client(
            address, description, content, engine=engine, draft=draft, sources=sources, credentials=credentials
        )
        self.client.connect(connect_timeout)
        self._deadline = deadline
        self._sequence = 0
        self._ids: list[int] = []
        self._prompt_count = self._candidate_count = 0

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        """Returns the candidates that continue `input_ids`, an array of all ids so far, as an array of that kind."""
        ids, known = input_ids.tolist(), len(self._ids)
        ended = []
        # A forward adds one id and those of right candidates; the next message of a chat adds more.
        if not known or not 0 < len(ids) - known <= 1 + self._candidate_count or ids[:known] != self._ids:
            ended = [self._sequence] if self._sequence else []
            # The last id is the first that was generated.
            self._sequence, self._prompt_count = self._sequence + 1, len(ids) - 1
        self._ids = ids
        step = SequenceStep(self._sequence, ids, generated_token_count=len(ids) - self._prompt_count)
        found = self.client.step([step], ended=ended, deadline=self._deadline).get(self._sequence)
        candidates = found.token_ids[: len(ids)] if found else ()
        self._candidate_count = len(candidates)
        result = input_ids[: len(candidates)].copy()
        result[:] = candidates
        return result

    def close(self) -> None:
        """Closes the connection; the `Llama` then decodes without candidates."""
        self.client.close()


def _read(tokenizer_json: str | Path | bytes) -> tuple[bytes, int]:
    """Returns the content of a `tokenizer.json` and its number of ids. Raises `ValueError`."""
    given = tokenizer_json
    remedy = "give the path of the model's own tokenizer.json, which save_pretrained writes"
    try:
        content = given if isinstance(given, bytes) else Path(given).read_bytes()
    except OSError as error:
        raise ValueError(f"{given!s} cannot be read ({error.strerror}): {remedy}") from error
    try:
        spec = json.loads(content)
        vocabulary = spec["model"]["vocab"]
        last = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        return content, int(max([last, *(token["id"] for token in spec.get("added_tokens", ()))])) + 1
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        name = "the content" if isinstance(given, bytes) else given
        raise ValueError(f"{name} is not a tokenizer.json ({type(error).__name__}: {error}): {remedy}") from error
