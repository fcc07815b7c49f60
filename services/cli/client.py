"""Commands that call a bridge: `generate`, `models`, `translate`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.message import Message
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from bridge.errors import InvalidField
from draftbridge import Event
from draftbridge.v1 import bridge_pb2, model_pb2
from services.cli.connection import Connect, Server, connecting
from services.cli.fitted import Fitted
from services.cli.terminal import DEFAULT_DRAFT, DEFAULT_TARGET, out, report
from services.config import DEFAULT_BRIDGE, MODEL_HELP
from services.interrupts import importing

_TOKENIZER_HELP = f"{MODEL_HELP[:-1]}, or a tokenizer.json. With --server: the name of a model that the bridge knows."


@connecting
def generate(
    connect: Connect,
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat, the user's message.")],
    server: Server = DEFAULT_BRIDGE,
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 is greedy decoding.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Keep the most probable tokens that add up to this.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep only this many of the most probable tokens.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less probable than this fraction of the most probable one.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less likely to repeat tokens.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted from generated tokens' logits.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, once per occurrence.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Minimum number of tokens to generate.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the model ends its text.")] = False,
    json_schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the JSON Schema of the output.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Generate any JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(help="The output matches this regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The output is one of these texts. Repeatable.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the Lark grammar of the output.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text; random if unset.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the output before this string. Repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, with the chat template.")
    ] = False,
    speculation: Annotated[str, typer.Option(help="Mode: off, lockstep, opportunistic or auto.")] = "auto",
    num_assistant_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Tokens of a turn of the draft, or that it may be ahead; unset: automatic."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Use only this source: grammar, draft, suffix (prompt lookup) or learned. Repeatable."),
    ] = None,
    target: Annotated[str, typer.Option(help="Name of the target, if the bridge has several.")] = "",
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Name of the draft; unset: the one with the highest expected speed. Repeatable."),
    ] = None,
    workload: Annotated[str, typer.Option(help="Kind of text, such as code: the bridge learns its best draft.")] = "",
    tenant: Annotated[
        str, typer.Option(help="Propose from this tenant's earlier outputs, and learn from this one.")
    ] = "",
    request_id: Annotated[str, typer.Option(help="The request's id in the logs and traces of all services.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Generate text through a bridge, and print it as it arrives."""
    if speculation == "off" and (source or num_assistant_tokens):
        raise typer.BadParameter("off uses no candidates: leave out --source and --num-assistant-tokens")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "json_schema": _read(json_schema),
        "json_object": json_object,
        "regex": regex,
        "choice": choice,
        "grammar": _read(grammar),
        "seed": seed,
        "stop": stop or (),
        "speculation": speculation,
        "num_assistant_tokens": num_assistant_tokens,
        "sources": source or (),
        "target": target,
        "draft": draft[0] if draft and len(draft) == 1 else "",
        "drafts": draft if draft and len(draft) > 1 else (),
        "workload": workload,
        "tenant": tenant,
        "request_id": request_id,
    }
    if chat:
        options["messages"] = [{"role": "user", "content": prompt}]
    with connect(server) as client:
        if as_json:
            # A terminal that is not of Unicode shows escapes.
            ascii_only = not sys.stdout.encoding.lower().startswith("utf")
            for event in client.stream(None if chat else prompt, **options):
                print(json.dumps(_as_dict(event), ensure_ascii=ascii_only), flush=True)
            return
        in_line = False
        try:
            for event in client.stream(None if chat else prompt, **options):
                if isinstance(event, bridge_pb2.GenerateDelta):
                    in_line = True
                    print(event.text, end="", flush=True)
        finally:  # an error in mid-stream begins on a line of its own
            if in_line:
                print(flush=True)
        assert isinstance(event, bridge_pb2.GenerateFinished), "a stream that ends well has one"
        report(_summary(event))


@connecting
def models(connect: Connect, server: Server = DEFAULT_BRIDGE) -> None:
    """List the models that a bridge is connected to, and the built-in models."""
    from services.store.built_in import BUILT_IN

    with connect(server) as client:
        found = client.models()
    table = Table(
        Column("model", no_wrap=True),
        "role",
        "engine",
        "device",
        "dtype",
        "context",
        "vocab",
        "tokenizer",
        title=Text(server, "table.title"),
    )
    for model in found:
        role = model_pb2.Role.Name(model.role).removeprefix("ROLE_").lower()
        table.add_row(
            escape(model.name), role, escape(model.engine), escape(model.device), escape(model.dtype),
            str(model.context_length), str(model.vocabulary_size), escape(model.tokenizer_sha256[:8]),
        )  # fmt: skip
    out.print(Fitted(table))
    report(f"built-in models for pull, serve and up: {', '.join(BUILT_IN)}")


@connecting
def translate(
    connect: Connect,
    text: Annotated[str, typer.Argument(help="The text to tokenize.")],
    source: Annotated[str, typer.Option("--from", help=f"A model. {_TOKENIZER_HELP}")] = DEFAULT_TARGET,
    target: Annotated[str, typer.Option("--to", help="The other model.")] = DEFAULT_DRAFT,
    server: Annotated[str, typer.Option(help="HOST:PORT of a bridge that tokenizes; unset: this command does.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print ids, offsets and bytes (in hex) as JSON.")] = False,
) -> None:
    """Show how two models split the same text into tokens."""
    with importing():
        from bridge.text.translation import segment
        from services.cli.segmentation import Segmentation, show
        from services.rpc.codec import write_translation
        from services.store.tokenizer import read_vocabulary

    if server:
        with connect(server) as client:
            answer = client.translate(text, source=source, target=target)
    else:
        data, one, other = _utf_8(text), read_vocabulary(source, report), read_vocabulary(target, report)
        answer = write_translation(one, segment(one, data), other, segment(other, data))
    rows: dict[str, Sequence[Any]] = {"from": answer.source_tokens, "to": answer.target_tokens}
    if as_json:
        for row, tokens in rows.items():
            rows[row] = [
                {"token_id": span.token_id, "byte_offset": span.byte_offset, "bytes": span.data.hex()}
                for span in tokens
            ]
        print(json.dumps(rows))
    else:
        above, below = ([span.data for span in tokens] for tokens in rows.values())
        show(out, Segmentation(source, above), Segmentation(target, below))


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(str(file), "a readable file of UTF-8 text", error) from None


def _utf_8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidField("TEXT", "valid UTF-8", "other bytes") from None


def _as_dict(event: Event) -> dict[str, Any]:
    match event:
        case bridge_pb2.GenerateStarted():
            return {"event": "started", **_fields(event)}
        case bridge_pb2.GenerateDelta():
            spans = [_fields(span) for span in event.spans]
            return {"event": "delta", "text": event.text, "token_ids": list(event.token_ids), "spans": spans}
        case _:
            return {"event": "finished", **_fields(event)}


def _fields(message: Message) -> dict[str, Any]:
    """Returns all fields of a message, including unset ones, with the names of enum values."""
    fields = {}
    for field in message.DESCRIPTOR.fields:
        value = _plain(getattr(message, field.name))
        fields[field.name] = field.enum_type.values_by_number[value].name if field.enum_type else value
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return _fields(value)
    return [_plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _summary(event: bridge_pb2.GenerateFinished) -> str:
    usage, speculation = event.usage, event.speculation
    seconds = speculation.elapsed_ns / 1e9
    text = f"{usage.generated_token_count} tokens in {seconds:.2f} s, {speculation.target_pass_count} target passes"
    if speculation.num_draft_tokens:
        text += f", {speculation.num_accepted_tokens} of {speculation.num_draft_tokens} candidates accepted"
    return f"{text}; {speculation.note}" if speculation.note else text
