"""The command `draftbridge`."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from bridge.errors import DraftBridgeError, InvalidField
from draftbridge import CallError, Client, Event
from draftbridge.v1 import bridge_pb2, model_pb2, sampling_pb2

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="Speculative decoding across tokenizers, processes and machines.\n\n"
    "[bold]up[/] starts a target, a draft and a bridge; [bold]generate[/] asks a bridge for text. To spread them over "
    "machines, run [bold]serve[/] where the models are and [bold]bridge[/] near the target.",
)

_out = Console()
_err = Console(stderr=True)

DEFAULT_TARGET = "gemma-3-270m"
DEFAULT_DRAFT = "smollm2-135m-instruct"
DEFAULT_SERVER = "127.0.0.1:50050"

_MODEL_HELP = "A built-in name such as gemma-3-270m, a directory, a GGUF file, or a Hugging Face id."
_SUFFIX_HELP = "As a draft also suffix, which needs no model: it says what the text said before."
_TOKENIZER_HELP = f"{_MODEL_HELP[:-1]}, or a tokenizer.json; with --server, a name that the bridge knows."
Hidden = Annotated[bool, typer.Option(hidden=True)]


def _report(text: str) -> None:
    _err.print(f"[dim]{text}[/]")


def _announce(address: str) -> None:
    from services.cli.processes import READY

    print(f"{READY}{address}", flush=True)


_ENGINE_HELP = "What runs it: torch, llamacpp, openvino, or auto for the fastest that is installed."
_WEIGHTS_HELP = "auto, full, int8 or int4; auto is int8 for openvino. torch has int8, llamacpp what the file has."


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help=_MODEL_HELP)],
    engine: Annotated[str, typer.Option(help=_ENGINE_HELP)] = "torch",
    weights: Annotated[str, typer.Option(help=_WEIGHTS_HELP)] = "auto",
) -> None:
    """Fetch a model and convert it if need be, so that serving it starts at once. Prints where it lies."""
    from services.launch import EngineName, Weights, prepare

    print(prepare(model, _one_of(EngineName, "engine", engine), _one_of(Weights, "weights", weights), _report))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help=f"{_MODEL_HELP} {_SUFFIX_HELP}")],
    role: Annotated[str, typer.Option(help="What to serve it as: draft, target or both.")] = "both",
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one and prints it.")] = "127.0.0.1:50051",
    name: Annotated[str, typer.Option(help="Name to serve it under; its own if empty.")] = "",
    engine: Annotated[str, typer.Option(help=_ENGINE_HELP)] = "torch",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(help="auto, float32, bfloat16 or float16; auto takes bfloat16 where the device computes in it."),
    ] = "auto",
    weights: Annotated[str, typer.Option(help=_WEIGHTS_HELP)] = "auto",
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile at start: minutes, then twice as fast. On CUDA: record graphs. (torch)"
        ),
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; unset uses all cores.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Sequences held at a time.")] = 8,
    kv_memory: Annotated[
        float,
        typer.Option(min=0.001, max=1e6, help="GiB for the keys and values of all slots, set aside from the start."),
    ] = 2.0,
    queue: Annotated[int, typer.Option(min=0, max=100_000, help="Sequences that may wait for a slot.")] = 64,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same text in every mode, bit for bit, in any dtype; slower.")
    ] = False,
    until_stdin_closes: Hidden = False,
) -> None:
    """Serve one model until stopped."""
    from services.launch import Dtype, EngineName, ModelServerConfig, Role, Weights, run_model_server

    config = ModelServerConfig(
        model=model,
        role=_one_of(Role, "role", role),
        listen=listen,
        name=name,
        engine=_one_of(EngineName, "engine", engine),
        device=device,
        dtype=_one_of(Dtype, "dtype", dtype),
        weights=_one_of(Weights, "weights", weights),
        compiled=compile,
        threads=threads,
        slots=slots,
        kv_memory=kv_memory,
        queue=queue,
        deterministic=deterministic,
        until_stdin_closes=until_stdin_closes,
    )
    run_model_server(config, _report, _announce)


@app.command()
def bridge(
    target: Annotated[list[str], typer.Option(help="HOST:PORT of a target service; may be given several times.")],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST:PORT of a draft service; may be given several times, or not at all. One that is away is used as "
            "soon as it is there."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one and prints it.")] = DEFAULT_SERVER,
    connect_timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds to wait for each target; without its targets a bridge does not start."),
    ] = 10.0,
    suffix_memory: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="MiB for earlier outputs as drafts, by tenant; 0 keeps none.")
    ] = 0,
    until_stdin_closes: Hidden = False,
) -> None:
    """Run a bridge between model services until stopped."""
    from services.launch import BridgeServerConfig, run_bridge_server

    config = BridgeServerConfig(
        tuple(target), tuple(draft or ()), listen, connect_timeout, suffix_memory, until_stdin_closes
    )
    run_bridge_server(config, _announce)


@app.command()
def up(
    target: Annotated[str, typer.Option(help=f"The model whose text you want. {_MODEL_HELP}")] = DEFAULT_TARGET,
    draft: Annotated[
        str, typer.Option(help="The model that guesses ahead of it; as for --target, or suffix. none for no draft.")
    ] = DEFAULT_DRAFT,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the bridge.")] = DEFAULT_SERVER,
    engine: Annotated[str, typer.Option(help="As for serve, for both.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for serve, for both.")] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="As for serve, for the target.")] = False,
) -> None:
    """Start a target, a draft and a bridge as three processes, until stopped with Ctrl-C."""
    from services.cli.processes import StopSignals, draft_threads, fleet
    from services.store.resolve import SUFFIX, resolve

    stop = StopSignals()
    drafted = None if draft == "none" else draft
    for model in [target] if drafted in (None, SUFFIX) else [target, drafted]:
        resolve(model, _report)
    options = ("--engine", engine, "--dtype", dtype)
    try:
        target_options = (*options, "--deterministic") if deterministic else options
        draft_options = (*options, "--threads", str(draft_threads()))
        with fleet(
            target, drafted, listen=listen, target_options=target_options, draft_options=draft_options
        ) as running:
            stop.started = True
            print(f"target  {target} at {running.target}")
            if drafted:
                print(f"draft   {draft} at {running.draft}")
            _announce(running.bridge)
            _err.print(
                f'[dim]try: draftbridge generate "Once upon a time" --server {running.bridge}    stop: Ctrl-C[/]'
            )
            # Without its draft the target goes on alone.
            needed = {name: process for name, process in running.processes.items() if name != "draft"}
            stop.wait(needed.values())
            if not stop.asked:
                ended = next(name for name, process in needed.items() if process.poll() is not None)
                _fail(f"the {ended} has ended; its own message is above")
    except KeyboardInterrupt:
        pass


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat, what the user says.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of a bridge.")] = DEFAULT_SERVER,
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from this much of the probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many tokens.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens less probable than this part of the best.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: fewer tokens that were there.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted for a token that was generated.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted each time that it was.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The fewest tokens to generate.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end of text.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text; unset draws one.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take the prompt as a chat message, by the models' templates.")
    ] = False,
    speculation: Annotated[str, typer.Option(help="off, lockstep, opportunistic or auto.")] = "auto",
    num_assistant_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Tokens of a draft's turn, or of its lead; chosen if unset."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Take candidates only from this source, draft or suffix; may be given several times."),
    ] = None,
    target: Annotated[str, typer.Option(help="Name of the target, if the bridge has several.")] = "",
    draft: Annotated[str, typer.Option(help="Name of the draft, if the bridge has several.")] = "",
    tenant: Annotated[str, typer.Option(help="Use and keep outputs of requests with the same tenant as drafts.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Ask a bridge for text, and print it as it comes."""
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
        "seed": seed,
        "stop": stop or (),
        "speculation": speculation,
        "num_assistant_tokens": num_assistant_tokens,
        "sources": source or (),
        "target": target,
        "draft": draft,
        "tenant": tenant,
    }
    if chat:
        options["messages"] = [{"role": "user", "content": prompt}]
    with Client(server) as client:
        for event in client.stream(None if chat else prompt, **options):
            if as_json:
                print(json.dumps(_as_dict(event), ensure_ascii=False), flush=True)
            elif isinstance(event, bridge_pb2.GenerateDelta):
                print(event.text, end="", flush=True)
            elif isinstance(event, bridge_pb2.GenerateFinished):
                print()
                _err.print(f"[dim]{_summary(event)}[/]", highlight=False)


@app.command()
def models(server: Annotated[str, typer.Option(help="HOST:PORT of a bridge.")] = DEFAULT_SERVER) -> None:
    """List the models that a bridge reaches, and the built-in ones."""
    from services.store.resolve import BUILT_IN

    with Client(server) as client:
        found = client.models()
    table = Table("model", "role", "engine", "device", "dtype", "context", "vocabulary", "tokenizer", title=server)
    for model in found:
        role = model_pb2.Role.Name(model.role).removeprefix("ROLE_").lower()
        table.add_row(
            model.name, role, model.engine, model.device, model.dtype, str(model.context_length),
            str(model.vocabulary_size), model.tokenizer_sha256[:8],
        )  # fmt: skip
    _out.print(table)
    _err.print(f"[dim]built in, for pull, serve and up: {', '.join(BUILT_IN)}[/]", highlight=False)


@app.command()
def translate(
    text: Annotated[str, typer.Argument(help="The text to be said in both models' tokens.")],
    source: Annotated[str, typer.Option("--from", help=f"A model. {_TOKENIZER_HELP}")] = DEFAULT_TARGET,
    target: Annotated[str, typer.Option("--to", help="The other model.")] = DEFAULT_DRAFT,
    server: Annotated[str, typer.Option(help="HOST:PORT of a bridge to ask; without it no service is needed.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print ids, offsets and bytes (in hex) as JSON.")] = False,
) -> None:
    """Show how two models cut the same text into tokens."""
    from bridge.text.translation import segment
    from services.cli.segmentation import Segmentation, show
    from services.rpc.codec import write_spans
    from services.store.resolve import read_vocabulary

    if server:
        with Client(server) as client:
            answer = client.translate(text, source=source, target=target)
        rows: dict[str, Sequence[Any]] = {"from": answer.source_tokens, "to": answer.target_tokens}
    else:
        data = _utf_8(text)
        vocabularies = {"from": read_vocabulary(source, _report), "to": read_vocabulary(target, _report)}
        rows = {row: write_spans(one, segment(one, data)) for row, one in vocabularies.items()}
    if as_json:
        for row, tokens in rows.items():
            rows[row] = [
                {"token_id": one.token_id, "byte_offset": one.byte_offset, "bytes": one.data.hex()} for one in tokens
            ]
        print(json.dumps(rows))
    else:
        above, below = ([one.data for one in tokens] for tokens in rows.values())
        show(_out, Segmentation(source, above), Segmentation(target, below))


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 64,
) -> None:
    """Start everything with the default pair, generate once with the draft and once without, and compare."""
    from services.cli.demo import run

    run(_out, prompt, max_tokens, DEFAULT_TARGET, DEFAULT_DRAFT, _report)


@app.command()
def version() -> None:
    """Print the version."""
    from services.version import VERSION

    print(VERSION)


def _utf_8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidField("TEXT", "valid UTF-8", "bytes that are none") from None


def _one_of(kind: Any, option: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise InvalidField(f"--{option}", f"one of {', '.join(kind)}", repr(value)) from None


def _as_dict(event: Event) -> dict[str, Any]:
    match event:
        case bridge_pb2.GenerateStarted():
            return {
                "event": "started",
                "target": event.target,
                "draft": event.draft,
                "seed": event.seed,
                "prompt_token_count": event.prompt_token_count,
            }
        case bridge_pb2.GenerateDelta():
            spans = [{"source": span.source, "byte_count": span.byte_count} for span in event.spans]
            return {"event": "delta", "text": event.text, "token_ids": list(event.token_ids), "spans": spans}
        case _:
            usage, speculation = event.usage, event.speculation
            return {
                "event": "finished",
                "finish_reason": sampling_pb2.FinishReason.Name(event.finish_reason),
                "usage": _fields(usage),
                "speculation": _fields(speculation),
            }


def _fields(message: Any) -> dict[str, Any]:
    """All fields of a message, also those that are not set."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


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


def _fail(message: str) -> NoReturn:
    _err.print(f"[bold red]error:[/] {message}", highlight=False, markup=True, soft_wrap=True)
    raise SystemExit(1)


def main() -> None:
    """The command's entry: errors of ours become a message and exit status 1."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # They tell of every kernel that they have for other devices, as soon as transformers looks for them.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The library's progress bars and advice are not ours to show.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except (DraftBridgeError, CallError) as error:
        from rich.markup import escape

        _fail(escape(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
