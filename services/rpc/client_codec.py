"""Converts between the contract's messages and the values of `bridge` for a client of a bridge; see `codec`."""

import json
from dataclasses import fields
from typing import Any

from bridge.generation import Delta, Finished
from bridge.request import Request
from bridge.statistics import DraftChoice, PlanStatistics, SourceStatistics, Statistics
from bridge.text.chat import Chat
from bridge.text.stream import Span
from draftbridge.v1 import bridge_pb2
from services.rpc import codec


def write_request(request: Request, target: str) -> bridge_pb2.GenerateRequest:
    """Returns a user's request as a client of a bridge sends it, without a draft. `target`: a name, or empty."""
    wanted = request.speculation
    message = bridge_pb2.GenerateRequest(
        sampling=codec.write_sampling(request.sampling),
        max_tokens=request.max_tokens,
        stop=request.stop,
        logprobs=request.logprobs,
        target=target,
        speculation=bridge_pb2.Speculation(**(vars(wanted) | {"mode": codec.write_mode(wanted.mode)})),
        tenant=request.tenant,
        reports_progress=request.reports_progress,
    )
    message.sampling.seed = request.seed
    match request.input:
        case str(text):
            message.prompt = text
        case Chat():
            message.chat.CopyFrom(_write_chat(request.input))
        case ids:
            message.token_ids.token_ids.extend(ids)
    return message


def _write_chat(chat: Chat) -> bridge_pb2.Chat:
    messages = [
        bridge_pb2.ChatMessage(role=one.role, content=one.content, fields_json=json.dumps(one.fields))
        for one in chat.messages
    ]
    return bridge_pb2.Chat(messages=messages, template_variables_json=json.dumps(chat.variables))


def read_delta(message: bridge_pb2.GenerateDelta) -> Delta:
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=codec.read_logprobs(message.logprobs),
        spans=tuple(Span(span.source, span.byte_count) for span in message.spans),
        progress=read_statistics(message.progress) if message.HasField("progress") else None,
    )


def read_finished(message: bridge_pb2.GenerateFinished) -> Finished:
    counted, usage = message.speculation, message.usage
    statistics = read_statistics(counted)
    statistics.cached_token_count = usage.cached_token_count
    return Finished(
        finish_reason=codec.FINISHED[message.finish_reason],
        prompt_token_count=usage.prompt_token_count,
        generated_token_count=usage.generated_token_count,
        generated_byte_count=counted.generated_byte_count,
        elapsed_ns=counted.elapsed_ns,
        first_token_ns=counted.first_token_ns,
        mode=codec.read_mode(counted.mode),
        statistics=statistics,
    )


def read_statistics(message: bridge_pb2.SpeculationStatistics) -> Statistics:
    """The inverse of `write_statistics`."""
    names = [one.name for one in fields(Statistics) if one.name in message.DESCRIPTOR.fields_by_name]
    composed = ("sources", "plans", "draft_choice")
    counted: dict[str, Any] = {name: getattr(message, name) for name in names if name not in composed}
    counted["num_accepted_tokens_per_position"] = list(message.num_accepted_tokens_per_position)
    counted["drafts"] = list(message.drafts)
    if message.HasField("draft_choice"):
        choice = message.draft_choice
        counted["draft_choice"] = DraftChoice(**{one.name: getattr(choice, one.name) for one in fields(DraftChoice)})
    statistics = Statistics(**counted)
    for source in message.sources:
        values = {one.name: getattr(source, one.name) for one in fields(SourceStatistics)}
        statistics.sources[source.name] = SourceStatistics(**values)
    for plan in message.plans:
        statistics.plans[plan.plan] = PlanStatistics(
            **{one.name: getattr(plan, one.name) for one in fields(PlanStatistics)}
        )
    return statistics
