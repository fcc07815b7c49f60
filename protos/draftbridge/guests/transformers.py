"""Gives the `generate` of a Hugging Face model candidates from a bridge.

>>> import draftbridge
>>> with draftbridge.assist(model, tokenizer, "localhost:50050"):
...     model.generate(**tokenizer("The capital of France is", return_tensors="pt"))
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.machine import compute_units
from draftbridge.security import Credentials
from draftbridge.v1 import model_pb2

# Long enough for a draft to propose several tokens. The bridge waits only where it predicts a gain.
_DEADLINE_SECONDS = 0.25
# Options of `generate` with which transformers cannot verify candidates, or does so with others.
_UNSUITABLE = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "custom_generate", "use_mtp")


class Assistance:
    """The candidates of one model. `close`, or the end of a `with` block, gives the model back as it was.

    `client.counts` shows what the bridge has answered. `generate` calls that cannot use candidates run as before: more
    than one prompt, beams, several return sequences, no cache or a static one, another assistant.
    """

    def __init__(self, model: Any, client: CandidateClient, deadline: float) -> None:
        self._model, self.client, self._deadline = model, client, deadline
        self._ids = itertools.count(1)
        self._generate, self._get_generator = model.generate, model._get_candidate_generator
        self._active = threading.local()
        self._lock = threading.Lock()
        model.generate = self._assisted_generate
        model._get_candidate_generator = self._candidate_generator

    def __enter__(self) -> "Assistance":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the candidates from the model, and closes the connection. May be called twice."""
        for name, own in (
            ("generate", self._assisted_generate),
            ("_get_candidate_generator", self._candidate_generator),
        ):
            if self._model.__dict__.get(name) == own:
                del self._model.__dict__[name]
        self.client.close()

    def _assisted_generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **options: Any) -> Any:
        config = generation_config or self._model.generation_config
        if not self._suits(inputs, config, options):
            return self._generate(inputs, generation_config, *args, **options)
        self._active.sequence = next(self._ids)
        try:
            # The number only leads `generate` to its assisted mode; the candidates are the bridge's.
            return self._generate(inputs, generation_config, *args, prompt_lookup_num_tokens=1, **options)
        finally:
            ended, self._active.sequence = self._active.sequence, None
            with self._lock:
                self.client.step([], ended=[ended], deadline=0)

    def _suits(self, inputs: Any, config: Any, options: dict[str, Any]) -> bool:
        ids = inputs if inputs is not None else options.get("input_ids")

        def value(name: str) -> Any:
            return options[name] if name in options else getattr(config, name, None)

        if ids is None or ids.ndim != 2 or ids.shape[0] != 1 or options.get("inputs_embeds") is not None:
            return False
        if any(value(name) for name in _UNSUITABLE) or value("cache_implementation") not in (None, "dynamic"):
            return False
        if (value("num_beams") or 1) > 1 or (value("num_return_sequences") or 1) > 1 or value("use_cache") is False:
            return False
        return not (getattr(self._model, "_is_stateful", False) or self._model.config.is_encoder_decoder)

    def _candidate_generator(self, *args: Any, **options: Any) -> Any:
        sequence = getattr(self._active, "sequence", None)
        if sequence is None:
            return self._get_generator(*args, **options)
        max_length = options["generation_config"].max_length
        return _Generator(self.client, self._lock, sequence, self._deadline, max_length)


class _Generator:
    """Implements `CandidateGenerator` of transformers for one call of `generate`.

    It returns no logits, so that transformers accepts a candidate only if it is what the model itself has chosen: the
    text has the model's own distribution, greedy or sampled.
    """

    requires_model_outputs = False

    def __init__(
        self, client: CandidateClient, lock: threading.Lock, sequence: int, deadline: float, max_length: int
    ) -> None:
        self._client, self._lock, self._sequence, self._deadline = client, lock, sequence, deadline
        self._max_length = max_length
        self._ids: list[int] = []
        self._prompt_count = self._forward_count = 0

    def get_candidates(self, input_ids: Any, **_: Any) -> tuple[Any, None]:
        """Returns the ids so far with candidates after them, and no logits."""
        self._ids += input_ids[0, len(self._ids) :].tolist()
        count = len(self._ids)
        first = not self._prompt_count
        self._prompt_count = self._prompt_count or count
        step = SequenceStep(
            self._sequence,
            self._ids,
            generated_token_count=count - self._prompt_count,
            # Before its first forward the model has not read the prompt, and the bridge neither.
            max_candidates=0 if first else max(self._max_length - count - 1, 0),
        )
        with self._lock:
            found = self._client.step([step], deadline=self._deadline, forward_token_count=self._forward_count).get(
                self._sequence
            )
        ids: Sequence[int] = found.token_ids if found else ()
        self._forward_count = len(ids) + (count if first else 1)
        if not ids:
            return input_ids, None
        longer = input_ids.new_empty((1, count + len(ids)))
        longer[0, :count] = input_ids[0]
        longer[0, count:] = input_ids.new_tensor(ids)
        return longer, None

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Does nothing: the bridge sees what was accepted in the next step."""


def assist(
    model: Any,
    tokenizer: Any,
    address: str,
    *,
    deadline: float = _DEADLINE_SECONDS,
    draft: str = "",
    sources: Sequence[str] = (),
    engine: str = "",
    credentials: Credentials | None = None,
    connect_timeout: float = 10.0,
    threads: Callable[[], int] | None = None,
) -> Assistance:
    """Makes `model.generate` verify candidates of the bridge at `address`, HOST:PORT. The texts stay the model's own.

    `tokenizer`: the model's, which must be a fast one. `deadline`: the most seconds that a forward waits for
    candidates; the bridge uses them only where its draft gains more. `draft`, `sources`, `engine`, `credentials`: see
    `CandidateClient`. `connect_timeout`: the seconds to wait for the bridge now; if it does not answer, generations
    run without candidates until it does. `threads` returns the number of threads that the model computes with, by
    default PyTorch's. Raises `ValueError` for a tokenizer without a `tokenizer.json`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            "the tokenizer has no tokenizer.json: load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    eos = model.generation_config.eos_token_id
    ends = (tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos]))
    units, unit_count = compute_units(str(model.device), (threads or _torch_threads)())
    description = model_pb2.Model(
        name=getattr(config, "_name_or_path", "") or type(model).__name__,
        engine="transformers",
        device=str(model.device),
        context_length=getattr(config, "max_position_embeddings", None) or 1 << 20,
        vocabulary_size=config.vocab_size,
        special_ids=model_pb2.SpecialIds(
            bos=tokenizer.bos_token_id,
            eos=dict.fromkeys(id_ for id_ in ends if id_ is not None),
            pad=tokenizer.pad_token_id,
        ),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else "",
        compute_units=sorted(units),
        compute_unit_count=unit_count,
    )
    client = CandidateClient(
        address,
        description,
        backend.to_str().encode(),
        engine=engine,
        draft=draft,
        sources=sources,
        credentials=credentials,
    )
    client.connect(connect_timeout)
    return Assistance(model, client, deadline)


def _torch_threads() -> int:
    import sys

    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch else 1
