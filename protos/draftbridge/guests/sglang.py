"""Gives SGLang candidates from a bridge: a plug-in that adds the speculative algorithm DRAFTBRIDGE.

    DRAFTBRIDGE_GUEST_BRIDGE=host:50050 python -m sglang.launch_server --model-path MODEL
        --speculative-algorithm DRAFTBRIDGE --speculative-num-draft-tokens 8

SGLang finds `register` by its entry-point group. The algorithm is SGLang's NGRAM with other candidates: the worker,
the scheduler's treatment and the verification are SGLang's own.
"""

import inspect
import itertools
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftbridge.candidates import SequenceStep
from draftbridge.guests.client import Client
from draftbridge.guests.description import chat_template, log_like, required, special_ids, tokenizer_json
from draftbridge.guests.settings import GuestSettings
from draftbridge.machine import compute_units
from draftbridge.v1 import model_pb2

NAME = "DRAFTBRIDGE"
# Tokens of a forward, of all its requests.
_TOKEN_COUNTS = tuple(1 << power for power in range(1, 17))


def register() -> None:
    """Adds the algorithm to SGLang's registry. SGLang calls this in each of its processes."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    # Everything that SGLang asks an algorithm is answered by NGRAM, except for the worker.
    methods = {
        name: staticmethod(getattr(SpeculativeAlgorithm.NGRAM, name))
        for name, value in vars(SpeculativeAlgorithm).items()
        if inspect.isfunction(value) and not name.startswith("_") and name != "create_worker"
    }
    algorithm = type("DraftBridgeAlgorithm", (CustomSpecAlgo,), methods)
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=algorithm)(lambda _: _worker_class())


def _worker_class() -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class DraftBridgeWorker(NGRAMWorker):  # type: ignore[misc]
        """SGLang's NGRAM worker, which looks its candidates up at a bridge instead of in a corpus."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.ngram_corpus = NoCorpus()
            self._asker = Asker(self.target_worker, self.server_args, self.draft_token_num)

        def _prepare_for_speculative_decoding(self, batch: Any) -> None:
            if not batch.forward_mode.is_decode():
                self._asker.read_prompt = True
            super()._prepare_for_speculative_decoding(batch)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
            added: list[list[int]] = [[] for _ in batch.reqs]
            if self.enable_overlap and not batch.grammar_needs_sync():
                ids, counts = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
                starts = range(0, len(ids), self.draft_token_num)
                accepted = [ids[start : start + count] for start, count in zip(starts, counts, strict=True)]
                # SGLang's cache has all tokens of a request but the last, which this forward computes.
                cached = batch.seq_lens_cpu.tolist()
                added = [
                    missing(one, new, count + 1) for one, new, count in zip(batch.reqs, accepted, cached, strict=True)
                ]
            return chains(*self._asker.ask(batch.reqs, added), self.draft_token_num)

        def _update_ngram_corpus(self, batch: Any) -> None:
            pass

    return DraftBridgeWorker


class NoCorpus:
    """Stands in for the corpus of SGLang's worker, which is not used."""

    def reset(self) -> None: ...

    def erase_match_state(self, request_ids: list[str]) -> None: ...


class Asker:
    """Asks the bridge for the requests of a batch. Under tensor parallelism one rank asks and broadcasts the answer.

    `read_prompt`: set if SGLang has read a prompt, or a part of one, since the bridge was asked last.
    """

    def __init__(self, target_worker: Any, server_args: Any, width: int) -> None:
        self._log = log_like("sglang")
        parallel = _parallel()
        settings, self._group = GuestSettings.read(None).of_replica(parallel.dp_rank), parallel.tp_group
        self._deadline, self._limit = settings.deadline_ms / 1000, width - 1
        self._numbers = itertools.count(1)
        self._texts: dict[str, _Text] = {}
        self._ended: list[int] = []
        self._returned_at = 0.0
        self.read_prompt, self._asked = False, set[str]()
        self._failed = False
        self._context_length = target_worker.model_runner.model_config.context_len
        self._client = None
        if self._group is None or self._group.rank_in_group == 0:
            self._client = _client(settings, target_worker, server_args)
            self._client.connect(timeout=0)

    def ask(self, requests: list[Any], added: list[list[int]]) -> tuple[list[int], list[list[int]]]:
        """Returns the last token of each request, and the candidates that follow it.

        `added`: tokens that the requests have gained but do not hold yet.
        """
        found: list[list[int]] = [[] for _ in requests]
        if self._client:
            try:
                found = self._step(self._client, requests, added)
            except Exception:
                if not self._failed:
                    self._failed = True
                    self._log.exception("a bug in DraftBridge's adapter for SGLang; SGLang goes on without candidates")
        if self._group is not None and self._group.world_size > 1:
            found = self._group.broadcast_object(found, src=0)
        last = [
            next(ids[-1] for ids in (new, one.output_ids, one.origin_input_ids_unpadded) if ids)
            for one, new in zip(requests, added, strict=True)
        ]
        return last, found

    def _step(self, client: Client, requests: list[Any], added: list[list[int]]) -> list[list[int]]:
        began = time.monotonic()
        texts = [self._text(one, new) for one, new in zip(requests, added, strict=True)]
        known = {one.rid for one in requests}
        # A forward runs the same number of tokens for each request, whatever is proposed. So its time shows what
        # candidates cost only if one request has it for itself. The bridge learns nothing of a forward that ran more
        # than 1.5 times the tokens that it knows of, and this is twice the most.
        is_known = len(known) == 1 and known == self._asked and not self.read_prompt
        token_count = 0 if is_known else 2 * (self._limit + 1) * len(known)
        self._asked, self.read_prompt = known, False
        self._ended += [self._texts.pop(rid).number for rid in tuple(self._texts) if rid not in known]
        sequences = []
        for text in texts:
            room = self._context_length - len(text.ids) - 1
            limit = max(min(self._limit, room), 0)
            sequences.append(
                SequenceStep(
                    text.number,
                    text.ids,
                    generated_token_count=len(text.ids) - text.prompt_count,
                    max_candidates=limit,
                    fixed_width=True,
                )
            )
        ended, self._ended = self._ended, []
        engine_seconds = began - self._returned_at if self._returned_at else 0.0
        found = client.step(
            sequences,
            ended=ended,
            deadline=self._deadline,
            engine_seconds=engine_seconds,
            forward_token_count=token_count,
        )
        self._returned_at = time.monotonic()
        return [list(found[text.number].token_ids) if text.number in found else [] for text in texts]

    def _text(self, request: Any, added: list[int]) -> "_Text":
        """Returns a request's tokens, of which only the new ones are copied."""
        parts = request.origin_input_ids_unpadded, request.output_ids, added
        text, count = self._texts.get(request.rid), sum(map(len, parts))
        if text:
            # A request only grows, or starts again; its last known token shows which.
            start = len(text.ids) - 1 if text.request is request else 0
            if len(text.ids) > count or _slice(parts, start, len(text.ids)) != text.ids[start:].tolist():
                self._ended.append(text.number)
                text = None
        text = text or _Text(request, next(self._numbers), array("q"), len(parts[0]))
        text.request, self._texts[request.rid] = request, text
        text.ids.extend(_slice(parts, len(text.ids), count))
        return text


@dataclass
class _Text:
    """The tokens of a request. `prompt_count`: how many of them are of its prompt; `number`: its id for the bridge."""

    request: Any
    number: int
    ids: "array[int]"
    prompt_count: int


def missing(request: Any, accepted: list[int], token_count: int) -> list[int]:
    """Returns those tokens of a request's last forward that it does not hold yet.

    A request gets the tokens of a forward while the next one runs. So it lacks them if the next one is its own, but not
    if the prompts of other requests are read in between. `token_count`: the tokens that it has in fact.
    """
    count = token_count - len(request.origin_input_ids) - len(request.output_ids)
    return accepted[max(len(accepted) - max(count, 0), 0) :]


def _slice(parts: Sequence[Sequence[int]], start: int, end: int) -> list[int]:
    """Returns the tokens from `start` to `end` of parts that follow one another."""
    found: list[int] = []
    for part in parts:
        found += part[max(start, 0) : max(end, 0)]
        start, end = start - len(part), end - len(part)
    return found


def chains(last: list[int], candidates: list[list[int]], width: int) -> tuple[Any, Any]:
    """Returns the tokens and the mask of SGLang's draft trees, each of which is one chain of `width` tokens.

    A chain begins with the last token of its request, and token 0 fills what candidates leave free, as one more
    candidate. SGLang's own trees are filled with children of the last token. But its sampler adds the chances of equal
    children, and a backend that knows only chains (breadth 1) would compute them after the candidates.
    `mask[i, j]`: token j precedes token i, or is it.
    """
    import numpy as np

    tokens = np.zeros((len(last), width), dtype=np.int32)
    for row, token, found in zip(tokens, last, candidates, strict=True):
        row[: 1 + len(found)] = token, *found
    mask = np.tile(np.tri(width, dtype=bool).reshape(-1), len(last))
    return tokens.reshape(-1), mask


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _client(settings: GuestSettings, target_worker: Any, server_args: Any) -> Client:
    runner, tokenizer = target_worker.model_runner, required(target_worker.tokenizer, "SGLang")
    config = runner.model_config
    generation = getattr(config, "hf_generation_config", None)
    gpus = range(runner.gpu_id, runner.gpu_id + server_args.tp_size * server_args.gpu_id_step, server_args.gpu_id_step)
    units, unit_count = compute_units(runner.device, None, gpus)
    model = model_pb2.Model(
        name=Path(server_args.served_model_name or config.model_path).name,
        engine="sglang",
        device=runner.device,
        compute_units=sorted(units),
        compute_unit_count=unit_count,
        dtype=str(config.dtype).removeprefix("torch."),
        context_length=config.context_len,
        vocabulary_size=config.vocab_size,
        special_ids=special_ids(tokenizer, (config.hf_eos_token_id, getattr(generation, "eos_token_id", None))),
        chat_template=chat_template(tokenizer),
        # A forward takes as long with any number of candidates. How long is not known, so the time of a single token is
        # left out.
        forward_costs=[model_pb2.ForwardCost(token_count=count, forward_ns=1_000_000) for count in _TOKEN_COUNTS],
    )
    # Unless the user chose a tokenizer, these arguments have None here, though SGLang's log has the model's path.
    file = tokenizer_json(server_args.tokenizer_path or config.model_path, server_args.revision, tokenizer)
    return settings.open_client(model, file)
