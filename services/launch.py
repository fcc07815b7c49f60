"""The two kinds of processes, put together and run until they are stopped."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from bridge.errors import InvalidField
from bridge.sampling.sampler import SamplingParameters
from bridge.sources.suffix_memory import SuffixMemory
from draftbridge.v1 import (
    bridge_pb2,
    bridge_pb2_grpc,
    draft_pb2,
    draft_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from services.bridge.servicer import BridgeServicer
from services.bridge.zoo import Zoo
from services.engines.engine import Engine, compute_units, measure, warm
from services.engines.fixed_width import FixedWidthEngine
from services.model.draft.servicer import DraftServicer
from services.model.draft.session import DraftSession
from services.model.draft.suffix import SuffixModel
from services.model.host import LoadedModel, load
from services.model.servicer import ModelServicer, describe
from services.model.target.servicer import TargetServicer
from services.model.target.session import TargetSession
from services.rpc import codec
from services.rpc.server import Server
from services.store.resolve import SUFFIX, default_name, has_gguf, resolve, resolve_gguf, resolve_openvino

OnStart = Callable[[str], None]
T = TypeVar("T")

# Widths of forwards that a target runs once before it serves: with as many candidates as bridges take from the text.
_WARMED = range(1, 26)
# The largest message that a model server takes: more than two million ids.
_MODEL_RECEIVE_LIMIT_BYTES = 8 << 20


class Role(StrEnum):
    """What a model server serves."""

    DRAFT = "draft"
    TARGET = "target"
    BOTH = "both"


class EngineName(StrEnum):
    """What runs a model; `auto` is the fastest that is installed, see `fastest_engine`."""

    AUTO = "auto"
    TORCH = "torch"
    LLAMACPP = "llamacpp"
    OPENVINO = "openvino"


class Dtype(StrEnum):
    """Type of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Weights(StrEnum):
    """How weights are kept: as the model has them, or in 8 or 4 bits."""

    AUTO = "auto"
    FULL = "full"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True)
class ModelServerConfig:
    """Everything that a model server is told."""

    model: str
    role: Role = Role.BOTH
    listen: str = "127.0.0.1:0"
    name: str = ""
    engine: EngineName = EngineName.TORCH
    device: str = "auto"
    dtype: Dtype = Dtype.AUTO
    weights: Weights = Weights.AUTO
    compiled: bool = False
    threads: int | None = None
    slots: int = 8
    kv_memory: float = 2.0
    queue: int = 64
    deterministic: bool = False
    until_stdin_closes: bool = False


@dataclass(frozen=True)
class BridgeServerConfig:
    """Everything that a bridge is told. `suffix_memory`: MiB for what tenants were told before."""

    targets: Sequence[str]
    drafts: Sequence[str] = field(default_factory=tuple)
    listen: str = "127.0.0.1:0"
    connect_timeout: float = 10.0
    suffix_memory: int = 0
    until_stdin_closes: bool = False


def run_model_server(config: ModelServerConfig, report: OnStart, on_start: OnStart) -> None:
    """Loads a model and serves it until stopped. `report` is told steps, `on_start` the address."""
    if config.model == SUFFIX:
        _run_suffix_server(config, on_start)
        return
    directory = resolve(config.model, report)
    if config.engine is EngineName.AUTO:
        engine = fastest_engine(config)
        # Of a model that is converted for it, the weights are kept as they are.
        full = engine is EngineName.OPENVINO and config.weights is Weights.AUTO
        config = replace(config, engine=engine, weights=Weights.FULL if full else config.weights)
        report(f"engine: {engine.value}")

    async def serve() -> None:
        server = Server(config.listen, _MODEL_RECEIVE_LIMIT_BYTES)
        stop = stop_event(config.until_stdin_closes)
        # In a thread, so that we can be stopped meanwhile.
        loaded = await _unless(stop, asyncio.to_thread(_load, config, directory, report))
        if loaded is None:
            # The thread cannot be, and would keep the process until it has read gigabytes for nobody.
            os._exit(0)
        register(server, loaded, config.role)
        await server.run_until(stop, on_start, lambda: loaded.scheduler.alive)
        loaded.scheduler.close()

    asyncio.run(serve())


def _run_suffix_server(config: ModelServerConfig, on_start: OnStart) -> None:
    """Serves the draft that needs no model. What is said of engines and their memory says nothing to it."""
    if config.role is not Role.DRAFT:
        raise InvalidField("--role", f"draft with {SUFFIX}, which has no text of its own", config.role.value)
    suffix = SuffixModel(config.name or SUFFIX, config.slots)
    description = codec.write_model(
        suffix.model,
        revision="1",
        role=model_pb2.ROLE_DRAFT,
        engine="suffix",
        device="cpu",
        slot_count=suffix.slot_count,
        deterministic=True,
    )

    async def serve() -> None:
        server = Server(config.listen, _MODEL_RECEIVE_LIMIT_BYTES)
        _register(
            server,
            ModelServicer(description, suffix.tokenizer_json),
            DraftServicer(suffix.model, lambda sampling, seed: suffix.open()),
            TargetServicer(suffix.model, None),
        )
        await server.run_until(stop_event(config.until_stdin_closes), on_start)

    asyncio.run(serve())


def run_bridge_server(config: BridgeServerConfig, on_start: OnStart) -> None:
    """Connects to model servers and serves until stopped."""

    async def serve() -> None:
        zoo = Zoo(config.targets, config.drafts, config.connect_timeout)
        try:
            server = Server(config.listen)
            stop = stop_event(config.until_stdin_closes)
            if await _unless(stop, zoo.connect()) is None:
                return
            server.register(
                bridge_pb2_grpc.add_BridgeServiceServicer_to_server,
                BridgeServicer(zoo, SuffixMemory(config.suffix_memory << 20) if config.suffix_memory else None),
                bridge_pb2.DESCRIPTOR.services_by_name["BridgeService"],
            )
            await server.run_until(stop, on_start)
        finally:
            await zoo.close()

    asyncio.run(serve())


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or None if `stop` came first; the work is cancelled then."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, stopped):
            one.cancel()


def _load(config: ModelServerConfig, directory: Path, report: OnStart) -> LoadedModel:
    costs: list[tuple[int, int]] = []

    def open_engine() -> Engine:
        engine = _engine(config, report)
        if config.deterministic:  # all its forwards have one shape
            engine = FixedWidthEngine(engine)
        elif config.role is not Role.DRAFT:
            warm(engine, _WARMED)
        costs.extend(measure(engine, all_logits=config.role is not Role.DRAFT))
        return engine

    loaded = load(directory, config.name or default_name(config.model), open_engine, config.queue)
    units, unit_count = compute_units(loaded.engine.device, config.threads)
    model = replace(loaded.model, forward_costs=tuple(costs), compute_units=units, compute_unit_count=unit_count)
    return replace(loaded, model=model)


def _engine(config: ModelServerConfig, report: OnStart) -> Engine:
    """Opens the engine that the configuration names. Raises `InvalidField` for settings that it does not have."""
    if config.compiled and config.engine is not EngineName.TORCH:
        raise InvalidField("--compile", "used with --engine torch only", f"--engine {config.engine.value}")
    options: dict[str, Any] = {
        "device": config.device,
        "threads": config.threads,
        "slot_count": config.slots,
        "cache_byte_limit": int(config.kv_memory * 2**30),
    }
    path = prepare(config.model, config.engine, config.weights, report)
    # Each is imported here because it takes seconds, and the others may not be installed.
    match config.engine:
        case EngineName.LLAMACPP:
            from services.engines.llamacpp.engine import LlamaCppEngine

            if config.dtype is not Dtype.AUTO:
                raise InvalidField("--dtype", "auto with --engine llamacpp, whose file has its own", config.dtype.value)
            return LlamaCppEngine(path, **options)
        case EngineName.OPENVINO:
            from services.engines.openvino.engine import OpenVinoEngine

            return OpenVinoEngine(path, dtype=config.dtype.value, **options)
        case _:
            from services.engines.torch.engine import TorchEngine

            options |= {"int8": config.weights is Weights.INT8, "compiled": config.compiled}
            return TorchEngine(path, dtype=config.dtype.value, **options)


def fastest_engine(config: ModelServerConfig) -> EngineName:
    """The fastest installed engine that runs the model with the weights that it has; see docs/engines.md."""
    from torch.cuda import is_available

    on_cpu = config.device == "cpu" or (config.device == "auto" and not is_available())
    if config.compiled or not on_cpu or config.weights is Weights.INT8:
        return EngineName.TORCH
    if config.dtype is Dtype.AUTO and has_gguf(config.model) and find_spec("llama_cpp"):
        return EngineName.LLAMACPP
    if not (find_spec("openvino") and find_spec("nncf")):
        return EngineName.TORCH
    from services.engines.openvino.engine import refuses

    return EngineName.TORCH if refuses(config.dtype.value, config.threads) else EngineName.OPENVINO


def prepare(model: str, engine: EngineName, weights: Weights, report: OnStart) -> Path:
    """What an engine reads of a model, fetched and converted. Raises `InvalidField` for weights that it cannot have."""
    match engine:
        case EngineName.AUTO:
            raise InvalidField("--engine", "a certain one: which is the fastest depends on how it is served", "auto")
        case EngineName.LLAMACPP:
            if weights is not Weights.AUTO:
                raise InvalidField("--weights", "auto with --engine llamacpp, whose file has its own", weights.value)
            resolve(model, report)  # for its tokenizer
            return resolve_gguf(model, report)
        case EngineName.OPENVINO:
            # Smaller weights are the faster ones on Intel's devices, and 8 bits cost next to no quality.
            chosen = Weights.INT8 if weights is Weights.AUTO else weights
            return resolve_openvino(resolve(model, report), default_name(model), chosen.value, report)
        case EngineName.TORCH:
            if weights is Weights.INT4:
                raise InvalidField("--weights", "auto, full or int8 with --engine torch", "int4")
            return resolve(model, report)


def register(server: Server, loaded: LoadedModel, role: Role) -> None:
    """Adds a loaded model's services; see `_register`."""

    def draft(sampling: SamplingParameters, seed: int) -> DraftSession:
        return DraftSession(loaded.model, loaded.scheduler, loaded.sampler(sampling, seed, confident=True))

    def target(sampling: SamplingParameters, seed: int, logprobs: int | None) -> TargetSession:
        return TargetSession(loaded.model, loaded.scheduler, loaded.sampler(sampling, seed, logprobs))

    number = {Role.DRAFT: model_pb2.ROLE_DRAFT, Role.TARGET: model_pb2.ROLE_TARGET, Role.BOTH: model_pb2.ROLE_BOTH}
    _register(
        server,
        ModelServicer(describe(loaded, number[role]), loaded.files.tokenizer_json),
        DraftServicer(loaded.model, draft if role in (Role.DRAFT, Role.BOTH) else None),
        TargetServicer(loaded.model, target if role in (Role.TARGET, Role.BOTH) else None),
    )


def _register(server: Server, model: ModelServicer, draft: DraftServicer, target: TargetServicer) -> None:
    """Adds all services; one whose role is not served refuses, and is in no list of services."""
    server.register(
        model_pb2_grpc.add_ModelServiceServicer_to_server,
        model,
        model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    )
    server.register(
        draft_pb2_grpc.add_DraftServiceServicer_to_server,
        draft,
        draft_pb2.DESCRIPTOR.services_by_name["DraftService"] if draft.serves else None,
    )
    server.register(
        target_pb2_grpc.add_TargetServiceServicer_to_server,
        target,
        target_pb2.DESCRIPTOR.services_by_name["TargetService"] if target.serves else None,
    )


def stop_event(watch_stdin: bool) -> asyncio.Event:
    """Set by SIGINT and SIGTERM; and, if asked, when standard input ends.

    It ends when the process that started us is gone, however it went.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_ in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_, event.set)

    def wait() -> None:
        # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
        while os.read(0, 1 << 16):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    if watch_stdin:
        threading.Thread(target=wait, name="stdin", daemon=True).start()
    return event
