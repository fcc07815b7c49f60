"""Gives vLLM candidates from a bridge: the proposer for its speculative method `custom_class`.

    vllm serve MODEL --additional-config '{"draftbridge": {"bridge": "host:50050"}}' --speculative-config
        '{"method": "custom_class", "model": "draftbridge.guests.vllm.Proposer", "num_speculative_tokens": 8}'

vLLM calls `propose` after each step with the rows of its batch, and verifies what it returns with its own rejection
sampler, as candidates without probabilities. So they change neither a greedy text nor a distribution.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftbridge.candidates import SequenceStep
from draftbridge.guests.client import Client
from draftbridge.guests.description import chat_template, log_like, required, special_ids, tokenizer_json
from draftbridge.guests.rows import Rows, RowSequence
from draftbridge.guests.settings import GuestSettings
from draftbridge.machine import compute_units
from draftbridge.v1 import model_pb2

# The tokens that a row may gain without a report, as a multiple of `num_speculative_tokens`: vLLM asks for no
# candidates while a row of its batch has less room than that in the context, which may be so for several rows in turn.
_MISSED_FACTOR = 3


class Proposer:
    """Proposes candidates for all rows of a worker's batch.

    Raises only from the constructor, for wrong settings. What only the bridge knows, such as a source or a draft by
    another name, is logged.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._log = log_like("vllm")
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        given = vllm_config.additional_config
        settings = GuestSettings.read(given.get("draftbridge") if isinstance(given, dict) else None)
        settings = settings.of_replica(vllm_config.parallel_config.data_parallel_index)
        self._limit: int = speculative.num_speculative_tokens
        self._context_length: int = model.max_model_len
        self._deadline = settings.deadline_ms / 1000
        self._rows = Rows(vllm_config.parallel_config.pipeline_parallel_size, _MISSED_FACTOR * self._limit)
        self._returned_at = 0.0
        self._failed = False
        self._on_cpu = str(vllm_config.device_config.device_type) == "cpu"
        # vLLM takes the candidates of the first rank of the tensor-parallel group, and sends them to all. But with an
        # external launcher each rank has a scheduler of its own, so the adapter sends them.
        group = _tensor_parallel_group()
        launcher = vllm_config.parallel_config.distributed_executor_backend
        self._broadcasting = group if launcher == "external_launcher" else None
        self._client = _client(settings, vllm_config) if group.rank_in_group == 0 else None

    def load_model(self, *_: object, **__: object) -> None:
        """Starts to connect. vLLM calls this when it has loaded its own model."""
        if self._on_cpu:
            from draftbridge.guests.vllm_sampler import mend_sampler

            mend_sampler(self._log)
        if self._client:
            self._client.connect(timeout=0)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Returns candidates for each row: `[]` for rows that have none, and for all if anything goes wrong.

        `sampled_token_ids`: the new tokens of each row, none while its prompt is being read. `num_tokens_no_spec`: the
        number of its tokens, new ones included. `token_ids_cpu`: its tokens in the first columns.
        """
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        try:
            if self._client and sampled_token_ids:
                found = self._propose(self._client, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            if not self._failed:
                self._failed = True
                self._log.exception("a bug in DraftBridge's adapter for vLLM; vLLM goes on without candidates")
        if self._broadcasting is not None:
            found = self._broadcasting.broadcast_object(found, src=0)
        return found

    def _propose(self, client: Client, sampled: list[list[int]], counts: Any, tokens: Any) -> list[list[int]]:
        began = time.monotonic()
        row_counts = counts[: len(sampled)].tolist()
        rows = self._rows.follow([len(ids) for ids in sampled], row_counts, tokens)
        found = client.step(
            [self._step_of(row, place, sampled[place], tokens) for place, row in enumerate(rows)],
            ended=self._rows.ended(),
            deadline=self._deadline,
            engine_seconds=began - self._returned_at if self._returned_at else 0.0,
            # vLLM does not tell how many tokens of a prompt it read. This many at most, so the bridge leaves the step
            # out where it learns what candidates cost.
            forward_token_count=sum(row.count for row in rows) if any(row.read_prompt for row in rows) else 0,
        )
        self._returned_at = time.monotonic()
        return [list(found[row.id].token_ids[: self._limit]) if row.id in found else [] for row in rows]

    def _step_of(self, row: RowSequence, place: int, sampled: list[int], tokens: Any) -> SequenceStep:
        room = self._context_length - row.count - 1
        return SequenceStep(
            row.id,
            tokens[place, : row.count],
            generated_token_count=row.count - row.prompt_count,
            # A prompt that is still being read is sent all the same, so that a draft reads it meanwhile.
            max_candidates=max(min(self._limit, room), 0) if sampled else 0,
            # A step that reads a prompt verifies nothing in its row.
            verified_count=0 if row.read_prompt else None,
        )


def _tensor_parallel_group() -> Any:
    from vllm.distributed import get_tp_group

    return get_tp_group()


def _gpus(parallel: Any) -> Sequence[int]:
    """Returns the numbers of the GPUs of all ranks; this one is the first of the last pipeline stage."""
    from torch.cuda import current_device

    stage, rank = parallel.tensor_parallel_size, current_device()
    # With several machines, this one has some of the stages.
    return range(max(rank - stage * (parallel.pipeline_parallel_size - 1), 0), rank + stage)


def _client(settings: GuestSettings, vllm_config: Any) -> Client:
    from vllm.tokenizers import cached_tokenizer_from_config

    model_config, device = vllm_config.model_config, str(vllm_config.device_config.device_type)
    # This variable holds the number of threads of vLLM's CPU workers.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    gpus = _gpus(vllm_config.parallel_config) if device == "cuda" else ()
    units, unit_count = compute_units(device, int(threads) if threads.isdecimal() else None, gpus)
    tokenizer = required(cached_tokenizer_from_config(model_config), "vLLM")
    generation = model_config.try_get_generation_config() or {}
    served: str | list[str] = model_config.served_model_name or model_config.model
    model = model_pb2.Model(
        name=Path(served if isinstance(served, str) else served[0]).name,
        engine="vllm",
        device=device,
        compute_units=sorted(units),
        compute_unit_count=unit_count,
        dtype=str(model_config.dtype).removeprefix("torch."),
        context_length=model_config.max_model_len,
        vocabulary_size=model_config.get_vocab_size(),
        special_ids=special_ids(
            tokenizer, (generation.get("eos_token_id"), getattr(model_config.hf_config, "eos_token_id", None))
        ),
        chat_template=chat_template(tokenizer),
    )
    file = tokenizer_json(model_config.tokenizer, model_config.tokenizer_revision, tokenizer)
    return settings.open_client(model, file)
