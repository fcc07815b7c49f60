"""Between the contract's messages and the values of `bridge`. Protocol buffers go no further than here.

Fields have the same names on both sides, so that a value is written as it is.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from google.protobuf import json_format, struct_pb2

from bridge.errors import InvalidField
from bridge.generation import Source
from bridge.models import Model, SpecialIds
from bridge.policy import Mode
from bridge.ports import Candidates, FinishReason, Grant, Logprob, Pass, Proposal, Run, Sync
from bridge.sampling import SamplingParameters
from bridge.suffix_memory import SuffixMemory
from bridge.templates import Chat, Message
from bridge.translation import Span
from bridge.vocabulary import Vocabulary
from draftbridge.v1 import bridge_pb2, draft_pb2, model_pb2, sampling_pb2, target_pb2

_FINISH = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: sampling_pb2.FINISH_REASON_CONTEXT_FULL,
}
_FINISHED = {number: reason for reason, number in _FINISH.items()}

_MODES = {
    bridge_pb2.Speculation.MODE_UNSPECIFIED: Mode.AUTO,
    bridge_pb2.Speculation.MODE_AUTO: Mode.AUTO,
    bridge_pb2.Speculation.MODE_OFF: Mode.OFF,
    bridge_pb2.Speculation.MODE_LOCKSTEP: Mode.LOCKSTEP,
    bridge_pb2.Speculation.MODE_OPPORTUNISTIC: Mode.OPPORTUNISTIC,
}
_SOURCES = {
    Source.NOBODY: bridge_pb2.CANDIDATE_SOURCE_UNSPECIFIED,
    Source.DRAFT: bridge_pb2.CANDIDATE_SOURCE_DRAFT,
    Source.TEXT: bridge_pb2.CANDIDATE_SOURCE_TEXT,
}

_MODE_NUMBERS = {mode: number for number, mode in _MODES.items()}


def read_sampling(message: sampling_pb2.SamplingParameters) -> SamplingParameters:
    """Unset fields stay None."""

    def optional(field: str) -> float | None:
        return float(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]

    return SamplingParameters(
        temperature=message.temperature,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=optional("top_p"),
        min_p=optional("min_p"),
        repetition_penalty=optional("repetition_penalty"),
        presence_penalty=optional("presence_penalty"),
        frequency_penalty=optional("frequency_penalty"),
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def write_sampling(parameters: SamplingParameters) -> sampling_pb2.SamplingParameters:
    """The inverse of `read_sampling`."""
    return sampling_pb2.SamplingParameters(**vars(parameters))


def read_chat(message: bridge_pb2.Chat) -> Chat:
    """Messages and template variables."""
    return Chat(
        tuple(Message(one.role, one.content, _read_struct(one.fields)) for one in message.messages),
        _read_struct(message.template_variables),
    )


def _read_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """JSON values. A Struct has no whole numbers; those that are whole become so again."""

    def whole(value: Any) -> Any:
        match value:
            case float() if value.is_integer():
                return int(value)
            case dict():
                return {key: whole(one) for key, one in value.items()}
            case list():
                return [whole(one) for one in value]
        return value

    return {key: whole(value) for key, value in json_format.MessageToDict(struct).items()}


def write_spans(spans: Sequence[Span]) -> list[bridge_pb2.TokenSpan]:
    """Tokens and where they stand."""
    return [
        bridge_pb2.TokenSpan(token_id=span.token_id, byte_offset=span.byte_offset, data=span.data) for span in spans
    ]


def write_prefix_cache(vocabulary: Vocabulary) -> bridge_pb2.PrefixCacheStatus:
    """How its prefix cache is doing."""
    return bridge_pb2.PrefixCacheStatus(tokenizer_sha256=vocabulary.sha256, **vars(vocabulary.prefixes.statistics))


def write_suffix_memory(memory: SuffixMemory | None) -> bridge_pb2.SuffixMemoryStatus | None:
    """How full it is, if there is one."""
    if memory is None:
        return None
    return bridge_pb2.SuffixMemoryStatus(
        tenant_count=memory.tenant_count, held_byte_count=memory.byte_count, limit_byte_count=memory.byte_limit
    )


def read_mode(number: int) -> Mode:
    """Raises `InvalidField` for a number that the contract has no name for."""
    for known, mode in _MODES.items():
        if known == number:
            return mode
    names = ", ".join(name for name in bridge_pb2.Speculation.Mode.keys())
    raise InvalidField("speculation.mode", f"one of {names}", number)


def write_mode(mode: Mode) -> bridge_pb2.Speculation.Mode.ValueType:
    return _MODE_NUMBERS[mode]


def write_source(source: Source) -> bridge_pb2.CandidateSource.ValueType:
    return _SOURCES[source]


def add_statistics(totals: bridge_pb2.SpeculationStatistics, one: bridge_pb2.SpeculationStatistics) -> None:
    """Adds up what can be."""
    for field, value in one.ListFields():
        if field.is_repeated:
            sums = getattr(totals, field.name)
            added = [old + new for old, new in zip_longest(sums, value, fillvalue=0)]
            sums[:] = added
        elif field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            setattr(totals, field.name, getattr(totals, field.name) + value)


def read_model(message: model_pb2.Model, vocabulary: Vocabulary) -> Model:
    ids = message.special_ids
    return Model(
        name=message.name,
        context_length=message.context_length,
        vocabulary_size=message.vocabulary_size,
        vocabulary=vocabulary,
        special_ids=SpecialIds(
            bos=ids.bos if ids.HasField("bos") else None,
            eos=tuple(ids.eos),
            pad=ids.pad if ids.HasField("pad") else None,
        ),
        chat_template=message.chat_template,
    )


def write_model(model: Model, **served: Any) -> model_pb2.Model:
    """The inverse of `read_model`, with what the bridge need not know."""
    ids = model.special_ids
    return model_pb2.Model(
        name=model.name,
        context_length=model.context_length,
        vocabulary_size=model.vocabulary_size,
        tokenizer_sha256=model.vocabulary.sha256,
        special_ids=model_pb2.SpecialIds(bos=ids.bos, eos=ids.eos, pad=ids.pad),
        chat_template=model.chat_template,
        **served,
    )


def read_sync(message: draft_pb2.DraftSync) -> Sync:
    return Sync(message.epoch, message.keep_token_count, tuple(message.token_ids), message.byte_offset, message.credit)


def write_sync(sync: Sync) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(sync=draft_pb2.DraftSync(**vars(sync)))


def read_proposal(message: draft_pb2.DraftResponse) -> Proposal:
    return Proposal(
        epoch=message.epoch,
        token_ids=tuple(message.token_ids),
        confidence=tuple(message.confidence),
        done=message.done,
        cached_token_count=message.cached_token_count,
        queue_ns=message.queue_ns,
        forward_ns=message.forward_ns,
    )


def write_proposal(proposal: Proposal) -> draft_pb2.DraftResponse:
    return draft_pb2.DraftResponse(**vars(proposal))


def read_run(message: target_pb2.VerifyRun) -> Run:
    return Run(
        base_token_count=message.base_token_count,
        token_ids=tuple(message.token_ids),
        byte_offset=message.byte_offset,
        empty_token_count=message.empty_token_count,
        generated_token_count=message.generated_token_count,
        credit=message.credit,
        patience_us=message.patience_us,
        width=message.width,
    )


def write_run(run: Run) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(run=target_pb2.VerifyRun(**vars(run)))


def read_candidates(message: target_pb2.VerifyCandidates) -> Candidates:
    return Candidates(message.base_token_count, tuple(message.token_ids))


def write_candidates(candidates: Candidates) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(candidates=target_pb2.VerifyCandidates(**vars(candidates)))


def read_grant(message: target_pb2.VerifyGrant) -> Grant:
    return Grant(
        credit=message.credit,
        patience_us=message.patience_us if message.HasField("patience_us") else None,
        width=message.width if message.HasField("width") else None,
    )


def write_grant(grant: Grant) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(grant=target_pb2.VerifyGrant(**vars(grant)))


def read_pass(message: target_pb2.VerifyResponse) -> Pass:
    return Pass(
        base_token_count=message.base_token_count,
        token_ids=tuple(message.token_ids),
        accepted_token_count=message.accepted_token_count,
        candidate_token_count=message.candidate_token_count,
        logprobs=tuple(
            Logprob(one.logprob, tuple((top.token_id, top.logprob) for top in one.top_logprobs))
            for one in message.logprobs
        ),
        finish_reason=_FINISHED.get(message.finish_reason),
        cached_token_count=message.cached_token_count,
        queue_ns=message.queue_ns,
        forward_ns=message.forward_ns,
        waited_ns=message.waited_ns,
        near_tie_count=message.near_tie_count,
    )


def write_pass(result: Pass) -> target_pb2.VerifyResponse:
    translated = {
        "logprobs": write_logprobs(result.logprobs),
        "finish_reason": write_finish_reason(result.finish_reason),
    }
    return target_pb2.VerifyResponse(**(vars(result) | translated))


def write_finish_reason(reason: FinishReason | None) -> sampling_pb2.FinishReason.ValueType:
    return _FINISH[reason] if reason else sampling_pb2.FINISH_REASON_UNSPECIFIED


def write_logprobs(logprobs: Sequence[Logprob]) -> list[sampling_pb2.TokenLogprobs]:
    return [
        sampling_pb2.TokenLogprobs(
            logprob=one.logprob,
            top_logprobs=[sampling_pb2.TopLogprob(token_id=id_, logprob=logprob) for id_, logprob in one.top],
        )
        for one in logprobs
    ]
