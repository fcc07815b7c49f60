"""Checks and converts messages of model streams.

A peer may send any number that a field can hold, and millions of ids in one message. Ids are counted before they are
converted, so a refused message costs only its parsing.
"""

import asyncio
from collections.abc import Sized
from dataclasses import replace

from bridge.errors import InvalidField, PromptTooLong, require
from bridge.ports import Candidates, Grant, Run, Sync
from bridge.sampling.sampler import SamplingParameters
from bridge.text.models import Model
from draftbridge.v1 import draft_pb2, sampling_pb2, target_pb2
from services.rpc import codec

MAX_LOGPROBS, MAX_BRANCHES = 100, 64
# Longer patience is cut to this: a draft that takes a minute is lost.
MAX_PATIENCE_US = 60_000_000
# Sampling parameters with more ids are read in a thread: each takes half a microsecond.
_MAX_INLINE_IDS = 4096


async def read_sampling(message: sampling_pb2.SamplingParameters, model: Model) -> SamplingParameters:
    """Returns parameters that fit the model. Raises `InvalidField`."""
    for field, ids in (("logit_bias", message.logit_bias), ("stop_token_ids", message.stop_token_ids)):
        _check_count(f"sampling.{field}", ids, model.vocabulary_size)
    if len(message.logit_bias) + len(message.stop_token_ids) > _MAX_INLINE_IDS:
        return await asyncio.to_thread(_read_sampling, message, model)
    return _read_sampling(message, model)


def _read_sampling(message: sampling_pb2.SamplingParameters, model: Model) -> SamplingParameters:
    return codec.read_sampling(message).checked(model.has_all)


def read_logprobs(opening: target_pb2.VerifyOpen) -> int | None:
    """Returns how many log probabilities to report per position, None for no report. Raises `InvalidField`."""
    if not opening.HasField("logprobs"):
        return None
    if opening.logprobs > MAX_LOGPROBS:
        raise InvalidField("open.logprobs", f"at most {MAX_LOGPROBS}", opening.logprobs)
    return opening.logprobs


def read_run(message: target_pb2.VerifyRun, model: Model) -> Run:
    """Returns a run whose ids fit into the model's context. Raises `PromptTooLong` or `InvalidField`."""
    length = message.base_token_count + len(message.token_ids)
    if len(message.token_ids) >= model.context_length:
        raise PromptTooLong(length, model.context_length, model.name)
    for field in ("generated_token_count", "empty_token_count"):
        if (count := getattr(message, field)) > length:
            raise InvalidField(f"run.{field}", f"at most the {length} tokens of the sequence", count)
    run = codec.read_run(message)
    return replace(run, patience_us=min(run.patience_us, MAX_PATIENCE_US))


def read_candidates(message: target_pb2.VerifyCandidates, model: Model) -> Candidates:
    """Returns no more candidates than the model's context holds. Raises `InvalidField`."""
    _check_count("candidates.token_ids", message.token_ids, model.context_length)
    _check_count("candidates.branches", message.branches, MAX_BRANCHES)
    return codec.read_candidates(message)


def read_grant(message: target_pb2.VerifyGrant) -> Grant:
    """Returns a grant whose patience is at most `MAX_PATIENCE_US`."""
    grant = codec.read_grant(message)
    if grant.patience_us is None:
        return grant
    return replace(grant, patience_us=min(grant.patience_us, MAX_PATIENCE_US))


def read_sync(message: draft_pb2.DraftSync, model: Model) -> Sync:
    """Returns a sync of at most twice the model's context. Raises `PromptTooLong` or `InvalidField`.

    A sequence that is a little too long is not refused: the draft then proposes nothing.
    """
    if len(message.token_ids) > 2 * model.context_length:
        length = message.keep_token_count + len(message.token_ids)
        raise PromptTooLong(length, model.context_length, model.name)
    least = message.min_batch_probability
    require(0.0 <= least <= 1.0, InvalidField, "sync.min_batch_probability", "between 0 and 1", least)
    return codec.read_sync(message)


def _check_count(field: str, ids: Sized, limit: int) -> None:
    if len(ids) > limit:
        raise InvalidField(field, f"at most {limit} ids", f"{len(ids)} ids")
