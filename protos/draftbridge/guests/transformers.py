"""Gives the `generate` of a Hugging Face model candidates from a bridge.

>>> import draftbridge
>>> with draftbridge.assist(model, tokenizer, "localhost:50050"):
...     model.generate(**tokenizer("The capital of France is", return_tensors="pt"))
"""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from draftbridge.candidates import DEFAULT_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS, Candidates, SequenceStep
from draftbridge.guests.client import Client, open_client
from draftbridge.guests.description import chat_template, special_ids
from draftbridge.machine import compute_units
from draftbridge.security import Credentials
from draftbridge.v1 import model_pb2

# Long enough for a draft to propose several tokens. The bridge waits only where it predicts a gain.
_DEADLINE_SECONDS = 0.25
# Options of `generate` with which candidates would change the text or raise. transformers looks for a stop after all
# accepted tokens, not after each; it computes again what a cache already holds, which then holds it twice; what a
# processor remembers of rejected candidates is never taken back; and it needs attentions, which not all models return.
_UNSUITABLE = (
    "assistant_ensemble_weight",
    "custom_generate",
    "logits_processor",
    "output_attentions",
    "stop_strings",
    "stopping_criteria",
    "watermarking_config",
)


class Assistance:
    """The candidates of one model. `close`, or the end of a `with` block, gives the model back as it was.

    `client.counts` shows what the bridge has answered. `generate` calls that cannot use candidates, or whose text they
    would change, run as before: more than one prompt, beams, several return sequences, no cache, a static one or one
    of the caller, another assistant, stop strings, stopping criteria, its logits processors, guidance, watermarks,
    attentions.
    """

    def __init__(self, model: Any, client: Client, deadline: float) -> None:
        self._model, self.client, self._deadline = model, client, deadline
        self._ids = itertools.count(1)
        self._running: set[int] = set()
        # Sequences whose end the bridge does not know yet.
        self._ended: deque[int] = deque()
        self._generate, self._get_generator = model.generate, model._get_candidate_generator
        self._owner = _owner_of(model)
        # What they have of their own in place of their classes' methods, such as another library's.
        self._before = vars(model).get("generate"), vars(self._owner).get("_get_candidate_generator")
        self._closed = False
        self._active = threading.local()
        self._lock, self._process = threading.Lock(), os.getpid()
        model.generate = self._assisted_generate
        self._owner._get_candidate_generator = self._candidate_generator

    def __enter__(self) -> "Assistance":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the candidates from the model, and closes the connection. May be called twice."""
        self._closed = True
        generate, generator = self._before
        for owner, name, own, before in (
            (self._model, "generate", self._assisted_generate, generate),
            (self._owner, "_get_candidate_generator", self._candidate_generator, generator),
        ):
            if (owned := vars(owner)).get(name) == own:
                del owned[name]
                if before:
                    owned[name] = before
        self.client.close()

    def _assisted_generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **options: Any) -> Any:
        if args or self._closed or not self._suits(inputs, generation_config, options):
            return self._generate(inputs, generation_config, *args, **options)
        self._active.sequence = sequence = next(self._ids)
        self._running.add(sequence)
        try:
            # The number only leads `generate` to its assisted mode; the candidates are the bridge's.
            return self._generate(inputs, generation_config, **options | {"prompt_lookup_num_tokens": 1})
        finally:
            self._active.sequence = None
            self._running.discard(sequence)
            self._ended.append(sequence)
            self._report([], DEFAULT_DEADLINE_SECONDS)

    def _suits(self, inputs: Any, generation_config: Any, options: dict[str, Any]) -> bool:
        """Returns whether candidates can be verified in this call of `generate`, and leave its text as it is."""
        model, ids = self._model, inputs if inputs is not None else options.get("input_ids")
        if ids is None or ids.ndim != 2 or ids.shape[0] != 1 or options.get("inputs_embeds") is not None:
            return False
        if getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder:
            return False
        if (getattr(model, "tp_size", None) or 1) > 1:  # each process would have other candidates
            return False
        config, others = model._prepare_generation_config(generation_config, **options)
        if config.get_generation_mode(others.get("assistant_model")).value not in ("greedy_search", "sample"):
            return False
        if any(getattr(config, name, None) or others.get(name) for name in _UNSUITABLE):
            return False
        # An empty cache is false. transformers 5.24 renamed the argument.
        if any(others.get(name) is not None for name in ("past_key_values", "cache")):
            return False
        if not config.use_cache or config.cache_implementation not in (None, "dynamic"):
            return False
        return config.num_return_sequences in (None, 1) and config.guidance_scale in (None, 1)

    def _candidate_generator(self, *args: Any, **options: Any) -> Any:
        sequence = getattr(self._active, "sequence", None)
        if sequence is None:
            return self._get_generator(*args, **options)
        config = options["generation_config"]
        ends = getattr(config, "_eos_token_tensor", None)
        return _Generator(self, sequence, config.max_length, () if ends is None else ends.reshape(-1).tolist())

    def _step(self, step: SequenceStep, engine_seconds: float, forward_token_count: int) -> Sequence[int] | None:
        """Reports a forward of a sequence, and returns candidates for the next one; None if it was not reported."""
        # While a call waits for a draft, no other call can report.
        deadline = self._deadline if len(self._running) <= 1 else min(self._deadline, DEFAULT_DEADLINE_SECONDS)
        found = self._report([step], deadline, engine_seconds=engine_seconds, forward_token_count=forward_token_count)
        if found is None:
            return None
        candidates = found.get(step.sequence_id)
        return candidates.token_ids if candidates else ()

    def _report(self, sequences: list[SequenceStep], deadline: float, **costs: Any) -> dict[int, Candidates] | None:
        """Returns what the client has for sequences; None if another call uses it until the deadline.

        A later report must then contain this one.
        """
        if self._process != os.getpid():  # after a fork: a thread that is not in this process may hold the lock
            self._lock, self._process = threading.Lock(), os.getpid()
            self._running &= {getattr(self._active, "sequence", None)}
        lock = self._lock
        if not lock.acquire(timeout=min(deadline, MAX_DEADLINE_SECONDS)):
            return None
        try:
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
            return self.client.step(sequences, ended=ended, deadline=deadline if sequences else 0, **costs)
        finally:
            lock.release()


def _owner_of(model: Any) -> Any:
    """Returns the model that asks itself for a generator: that of a wrapper, such as PEFT's, which has its methods."""
    owner = getattr(model._get_candidate_generator, "__self__", model)
    if isinstance(owner, Assistance):  # another one is at work
        owner = owner._owner
    return owner if hasattr(type(owner), "_get_candidate_generator") else model


class _Generator:
    """Implements `CandidateGenerator` of transformers for one call of `generate`.

    It returns no logits, so that transformers accepts a candidate only if it is what the model itself has chosen: the
    text has the model's own distribution, greedy or sampled.
    """

    requires_model_outputs = False

    def __init__(self, assistance: Assistance, sequence: int, max_length: int, ends: Sequence[int]) -> None:
        self._assistance, self._sequence, self._max_length, self._ends = assistance, sequence, max_length, ends
        self._ids: list[int] = []
        self._prompt_count = self._forward_count = self._verified_count = 0
        self._returned_at = 0.0

    def get_candidates(self, input_ids: Any, **_: Any) -> tuple[Any, None]:
        """Returns the ids so far with candidates after them, and no logits."""
        began = time.monotonic()
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
            verified_count=self._verified_count,
        )
        engine_seconds = began - self._returned_at if self._returned_at else 0.0
        ids = self._assistance._step(step, engine_seconds, self._forward_count)
        if ids is None:
            # The next report is of this forward, too. With this number of tokens, more than 1.5 times those that one
            # forward ran, the bridge leaves it out where it learns what candidates cost.
            self._forward_count = max(self._forward_count, 2 * (self._verified_count + 1))
            return input_ids, None
        # Older versions of transformers do not end a text within the accepted tokens.
        end = next((place for place, id_ in enumerate(ids, 1) if id_ in self._ends), None)
        ids = ids[:end]
        self._verified_count = len(ids)
        self._forward_count, self._returned_at = len(ids) + (count if first else 1), time.monotonic()
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

    The address "local" needs no bridge: candidates come from what repeats in the text, as the same algorithm finds it
    in this process.

    `tokenizer`: the model's, which must be a fast one. `deadline`: the most seconds that a forward waits for
    candidates; the bridge uses them only where its draft gains more. `draft`, `sources`, `engine`, `credentials`: see
    `CandidateClient`. `connect_timeout`: the seconds to wait for the bridge now; if it does not answer, generations
    run without candidates until it does. `threads` returns the number of threads that the model computes with, by
    default PyTorch's. Raises `ValueError` for a tokenizer without a `tokenizer.json`, and for an address that is none.
    """
    if not deadline >= 0:
        raise ValueError(f"the deadline must be at least 0 seconds, got {deadline}")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            "the tokenizer has no tokenizer.json: load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    units, unit_count = compute_units(str(model.device), (threads or _torch_threads)())
    description = model_pb2.Model(
        name=getattr(config, "_name_or_path", "") or type(model).__name__,
        engine="transformers",
        device=str(model.device),
        context_length=getattr(config, "max_position_embeddings", None) or 1 << 20,
        vocabulary_size=config.vocab_size,
        special_ids=special_ids(tokenizer, (model.generation_config.eos_token_id,)),
        chat_template=chat_template(tokenizer),
        compute_units=sorted(units),
        compute_unit_count=unit_count,
    )
    client = open_client(
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
