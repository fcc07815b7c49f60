"""Converts between the contract's messages and the values of `bridge`.

Fields have the same names on both sides, so most values are written with `vars`.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from bridge.errors import InvalidField, require
from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode
from bridge.ports import MAX_MEASURED_NS, Candidates, FinishReason, Grant, Logprob, Pass, Proposal, Run, Sync
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.ngrams import NgramMemory
from bridge.statistics import Statistics
from bridge.text.chat import Chat, Message, measured
from bridge.text.json_objects import count_marks, read_object
from bridge.text.models import Model, SpecialIds
from bridge.text.vocabulary import Vocabulary
from draftbridge.v1 import bridge_pb2, draft_pb2, model_pb2, sampling_pb2, target_pb2

_FINISH = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: sampling_pb2.FINISH_REASON_CONTEXT_FULL,
}
FINISHED = {number: reason for reason, number in _FINISH.items()}

_MODES = {
    bridge_pb2.Speculation.MODE_UNSPECIFIED: Mode.AUTO,
    bridge_pb2.Speculation.MODE_AUTO: Mode.AUTO,
    bridge_pb2.Speculation.MODE_OFF: Mode.OFF,
    bridge_pb2.Speculation.MODE_LOCKSTEP: Mode.LOCKSTEP,
    bridge_pb2.Speculation.MODE_OPPORTUNISTIC: Mode.OPPORTUNISTIC,
}
_MODE_NUMBERS = {mode: number for number, mode in _MODES.items()}

# In the JSON of a chat, see `count_marks`. With this limit Python's parser takes up to 15 ms.
_MAX_JSON_MARKS = 1 << 16


def read_sampling(message: sampling_pb2.SamplingParameters) -> SamplingParameters:
    """Converts the parameters; unset optional fields become None."""

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
        grammar=_read_grammar(message),
    )


def _read_grammar(message: sampling_pb2.SamplingParameters) -> Grammar | None:
    match message.WhichOneof("grammar_kind"):
        case None:
            return None
        case "choice":
            return Grammar.choice(message.choice.texts)
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT) if message.json_object else None
        case kind:
            return Grammar(GrammarKind(kind), getattr(message, kind))


def write_sampling(parameters: SamplingParameters) -> sampling_pb2.SamplingParameters:
    """The inverse of `read_sampling`."""
    fields = dict(vars(parameters))
    match fields.pop("grammar"):
        case None:
            pass
        case Grammar(GrammarKind.CHOICE, text):
            fields["choice"] = sampling_pb2.Choice(texts=json.loads(text))
        case Grammar(GrammarKind.JSON_OBJECT):
            fields["json_object"] = True
        case Grammar(kind, text):
            fields[kind.value] = text
    return sampling_pb2.SamplingParameters(**fields)


def read_chat(message: bridge_pb2.Chat) -> Chat:
    """Converts a chat. Raises `InvalidField` for fields that are not JSON objects, or too large ones."""
    variables = message.template_variables_json
    # All at once, because each count takes a while, in the order in which they are read: what follows a text with an
    # open string is not.
    texts = [*(one.fields_json for one in message.messages), variables]
    marks = sum(count_marks("\n".join(texts).encode()))
    allowed = f"a chat with at most {_MAX_JSON_MARKS} commas, [ and {{ in its JSON, outside of strings"
    require(marks <= _MAX_JSON_MARKS, InvalidField, "the prompt", allowed, marks)
    messages = [
        Message(one.role, one.content, _read_fields(f"chat.messages[{place}].fields_json", one.fields_json))
        for place, one in enumerate(message.messages)
    ]
    return measured(Chat(tuple(messages), _read_fields("chat.template_variables_json", variables)))


def _read_fields(name: str, text: str) -> dict[str, Any]:
    """Returns an object of a chat; without a text, an empty one."""
    return read_object(name, text) if text else {}


def write_translation(
    source: Vocabulary, source_ids: Sequence[int], target: Vocabulary, target_ids: Sequence[int]
) -> bridge_pb2.TranslateResponse:
    """Returns the tokens of both models with their bytes and byte offsets."""
    answer = bridge_pb2.TranslateResponse()
    for spans, vocabulary, ids in (
        (answer.source_tokens, source, source_ids),
        (answer.target_tokens, target, target_ids),
    ):
        offset = 0
        for id_ in ids:
            data = vocabulary.token_bytes(id_)
            # In place: as a message of its own, each would take twenty times the memory.
            spans.add(token_id=id_, byte_offset=offset, data=data, name="" if data else vocabulary.name(id_))
            offset += len(data)
    return answer


def write_prefix_cache(vocabulary: Vocabulary) -> bridge_pb2.PrefixCacheStatus:
    """Returns the counters of a tokenizer's prefix cache."""
    cache = vocabulary.prefixes
    return bridge_pb2.PrefixCacheStatus(
        tokenizer_sha256=vocabulary.sha256,
        query_byte_count=cache.query_byte_count,
        hit_byte_count=cache.hit_byte_count,
        block_count=cache.prompt_count,
        held_byte_count=cache.held_byte_count,
    )


def write_ngram_memory(memory: NgramMemory | None) -> bridge_pb2.NgramMemoryStatus | None:
    """Returns how full the memory is, or None without one."""
    if memory is None:
        return None
    return bridge_pb2.NgramMemoryStatus(
        tenant_count=memory.tenant_count, held_byte_count=memory.byte_count, limit_byte_count=memory.byte_limit
    )


def read_mode(number: int) -> Mode:
    """Converts a mode. Raises `InvalidField` for a number that the contract does not define."""
    for known, mode in _MODES.items():
        if known == number:
            return mode
    names = ", ".join(name for name in bridge_pb2.Speculation.Mode.keys())
    raise InvalidField("speculation.mode", f"one of {names}", number)


def write_mode(mode: Mode) -> bridge_pb2.Speculation.Mode.ValueType:
    return _MODE_NUMBERS[mode]


def add_statistics(totals: bridge_pb2.SpeculationStatistics, one: bridge_pb2.SpeculationStatistics) -> None:
    """Adds the counts of one generation to `totals`, also those of each source and each kind of plan."""
    for field, value in one.ListFields():
        if field.name in ("sources", "plans"):
            _add_named(getattr(totals, field.name), value, "name" if field.name == "sources" else "plan")
        elif field.is_repeated and field.cpp_type != field.CPPTYPE_STRING:
            sums = getattr(totals, field.name)
            sums[:] = [_sum(field, old, new) for old, new in zip_longest(sums, value, fillvalue=0)]
        elif field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            setattr(totals, field.name, _sum(field, getattr(totals, field.name), value))


def _add_named(totals: Any, ones: Any, key: str) -> None:
    by_name = {getattr(total, key): total for total in totals}
    for one in ones:
        total = by_name.get(getattr(one, key)) or totals.add(**{key: getattr(one, key)})
        for field, value in one.ListFields():
            if field.name != key:
                setattr(total, field.name, _sum(field, getattr(total, field.name), value))


def _sum(field: FieldDescriptor, old: float, new: float) -> float:
    """Adds, but not beyond the field's largest value: a bridge may run for years."""
    largest = {field.CPPTYPE_UINT32: 2**32 - 1, field.CPPTYPE_UINT64: 2**64 - 1}.get(field.cpp_type, float("inf"))
    return min(old + new, largest)


def write_delta(delta: Delta) -> bridge_pb2.GenerateDelta:
    return bridge_pb2.GenerateDelta(
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=write_logprobs(delta.logprobs),
        spans=[bridge_pb2.TextSpan(byte_count=span.byte_count, source=span.source) for span in delta.spans],
        progress=write_statistics(delta.progress) if delta.progress else None,
    )


def write_finished(event: Finished) -> bridge_pb2.GenerateFinished:
    statistics = write_statistics(event.statistics)
    statistics.mode = write_mode(event.mode)
    statistics.generated_byte_count = event.generated_byte_count
    statistics.elapsed_ns, statistics.first_token_ns = event.elapsed_ns, event.first_token_ns
    return bridge_pb2.GenerateFinished(
        finish_reason=write_finish_reason(event.finish_reason),
        usage=bridge_pb2.Usage(
            prompt_token_count=event.prompt_token_count,
            generated_token_count=event.generated_token_count,
            cached_token_count=event.statistics.cached_token_count,
        ),
        speculation=statistics,
    )


def write_statistics(statistics: Statistics) -> bridge_pb2.SpeculationStatistics:
    """Returns what the passes of a generation, running or finished, have counted."""
    return bridge_pb2.SpeculationStatistics(**statistics.reported)


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
        forward_costs=tuple((one.token_count, one.forward_ns) for one in message.forward_costs),
        compute_units=frozenset(message.compute_units),
        compute_unit_count=message.compute_unit_count,
        branches=message.branches,
    )


def write_model(model: Model, **served: Any) -> model_pb2.Model:
    """The inverse of `read_model`. `served`: fields that only the description of a server has."""
    ids = model.special_ids
    return model_pb2.Model(
        name=model.name,
        context_length=model.context_length,
        vocabulary_size=model.vocabulary_size,
        tokenizer_sha256=model.vocabulary.sha256,
        special_ids=model_pb2.SpecialIds(bos=ids.bos, eos=ids.eos, pad=ids.pad),
        chat_template=model.chat_template,
        forward_costs=[
            model_pb2.ForwardCost(token_count=token_count, forward_ns=forward_ns)
            for token_count, forward_ns in model.forward_costs
        ],
        compute_units=sorted(model.compute_units),
        compute_unit_count=model.compute_unit_count,
        branches=model.branches,
        **served,
    )


def read_sync(message: draft_pb2.DraftSync) -> Sync:
    return Sync(
        epoch=message.epoch,
        keep_token_count=message.keep_token_count,
        token_ids=tuple(message.token_ids),
        byte_offset=message.byte_offset,
        credit=message.credit,
        batch_token_count=message.batch_token_count,
        min_batch_probability=message.min_batch_probability,
    )


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
        read_token_count=message.read_token_count,
        read_ns=message.read_ns,
        runner_up_ids=tuple(message.runner_up_ids),
        runner_up_confidence=tuple(message.runner_up_confidence),
    )


def write_proposal(proposal: Proposal) -> draft_pb2.DraftResponse:
    return draft_pb2.DraftResponse(**_sendable(proposal))


def read_run(message: target_pb2.VerifyRun) -> Run:
    return Run(
        base_token_count=message.base_token_count,
        token_ids=tuple(message.token_ids),
        byte_offset=message.byte_offset,
        empty_token_count=message.empty_token_count,
        generated_token_count=message.generated_token_count,
        credit=message.credit,
        patience_us=message.patience_us,
    )


def write_run(run: Run) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(run=target_pb2.VerifyRun(**vars(run)))


def read_candidates(message: target_pb2.VerifyCandidates) -> Candidates:
    branches = tuple((one.index, one.token_id) for one in message.branches)
    return Candidates(message.offer_id, message.base_token_count, tuple(message.token_ids), message.width, branches)


def write_candidates(candidates: Candidates) -> target_pb2.VerifyRequest:
    branches = [target_pb2.CandidateBranch(index=index, token_id=id_) for index, id_ in candidates.branches]
    written = target_pb2.VerifyCandidates(**(vars(candidates) | {"branches": branches}))
    return target_pb2.VerifyRequest(candidates=written)


def read_grant(message: target_pb2.VerifyGrant) -> Grant:
    return Grant(
        credit=message.credit,
        patience_us=message.patience_us if message.HasField("patience_us") else None,
    )


def write_grant(grant: Grant) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(grant=target_pb2.VerifyGrant(**vars(grant)))


def read_pass(message: target_pb2.VerifyResponse) -> Pass:
    return Pass(
        base_token_count=message.base_token_count,
        token_ids=tuple(message.token_ids),
        accepted_token_count=message.accepted_token_count,
        candidate_token_count=message.candidate_token_count,
        offer_id=message.offer_id,
        logprobs=read_logprobs(message.logprobs),
        finish_reason=FINISHED.get(message.finish_reason),
        cached_token_count=message.cached_token_count,
        queue_ns=message.queue_ns,
        forward_ns=message.forward_ns,
        waited_ns=message.waited_ns,
        near_tie_count=message.near_tie_count,
        branch_count=message.branch_count,
        branch_accepted=message.branch_accepted,
    )


def read_logprobs(messages: Iterable[sampling_pb2.TokenLogprobs]) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(one.logprob, tuple((top.token_id, top.logprob) for top in one.top_logprobs)) for one in messages
    )


def write_pass(result: Pass) -> target_pb2.VerifyResponse:
    translated = {
        "logprobs": write_logprobs(result.logprobs),
        "finish_reason": write_finish_reason(result.finish_reason),
    }
    return target_pb2.VerifyResponse(**(_sendable(result) | translated))


def _sendable(result: Pass | Proposal) -> dict[str, Any]:
    """Returns the fields of a result, with times of an hour at most: a slow machine may need longer for a prompt."""
    return {
        name: min(value, MAX_MEASURED_NS) if name.endswith("_ns") else value for name, value in vars(result).items()
    }


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
