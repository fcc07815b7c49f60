"""The two kinds of processes, put together and run until they are stopped."""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

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
from services.draft.servicer import DraftServicer
from services.engine.engine import Engine
from services.model.host import LoadedModel, load
from services.model.servicer import ModelServicer
from services.model.store import default_name, resolve
from services.serving import Registration, Server
from services.target.servicer import TargetServicer

OnStart = Callable[[str], None]


class Role(StrEnum):
    """What a model server serves."""

    DRAFT = "draft"
    TARGET = "target"
    BOTH = "both"


class EngineName(StrEnum):
    """What runs a model."""

    TORCH = "torch"


class Dtype(StrEnum):
    """Type of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


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
    threads: int | None = None
    slots: int = 8
    until_stdin_closes: bool = False


@dataclass(frozen=True)
class BridgeServerConfig:
    """Everything that a bridge is told."""

    targets: Sequence[str]
    drafts: Sequence[str] = field(default_factory=tuple)
    listen: str = "127.0.0.1:0"
    connect_timeout: float = 10.0
    until_stdin_closes: bool = False


def run_model_server(config: ModelServerConfig, report: OnStart, on_start: OnStart) -> None:
    """Loads a model and serves it until stopped. `report` is told steps, `on_start` the address."""
    directory = resolve(config.model, report)

    async def serve() -> None:
        server = Server(config.listen)
        loaded = load(directory, config.name or default_name(config.model), _engine(config, directory))
        server.register(_registrations(loaded, config.role), lambda: loaded.host.scheduler.alive)
        await server.run_until_stopped(on_start, stop=_stdin_closed(config.until_stdin_closes))
        loaded.host.scheduler.close()

    asyncio.run(serve())


def run_bridge_server(config: BridgeServerConfig, on_start: OnStart) -> None:
    """Connects to model servers and serves until stopped."""

    async def serve() -> None:
        zoo = Zoo(config.targets, config.drafts, config.connect_timeout)
        try:
            server = Server(config.listen)
            await zoo.connect()
            descriptor = bridge_pb2.DESCRIPTOR.services_by_name["BridgeService"]
            add = bridge_pb2_grpc.add_BridgeServiceServicer_to_server
            server.register([(add, BridgeServicer(zoo), descriptor)])
            await server.run_until_stopped(on_start, stop=_stdin_closed(config.until_stdin_closes))
        finally:
            await zoo.close()

    asyncio.run(serve())


def _engine(config: ModelServerConfig, directory: Path) -> Engine:
    # Imported here because it takes seconds, and no other command needs it.
    from services.engine.torch_engine import TorchEngine

    return TorchEngine(
        directory,
        device=config.device,
        dtype=config.dtype.value,
        threads=config.threads,
        slot_count=config.slots,
    )


def _registrations(loaded: LoadedModel, role: Role) -> list[Registration]:
    number = {Role.DRAFT: model_pb2.ROLE_DRAFT, Role.TARGET: model_pb2.ROLE_TARGET, Role.BOTH: model_pb2.ROLE_BOTH}
    registrations: list[Registration] = [
        (
            model_pb2_grpc.add_ModelServiceServicer_to_server,
            ModelServicer(loaded, number[role]),
            model_pb2.DESCRIPTOR.services_by_name["ModelService"],
        )
    ]
    if role in (Role.DRAFT, Role.BOTH):
        registrations.append(
            (
                draft_pb2_grpc.add_DraftServiceServicer_to_server,
                DraftServicer(loaded),
                draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
            )
        )
    if role in (Role.TARGET, Role.BOTH):
        registrations.append(
            (
                target_pb2_grpc.add_TargetServiceServicer_to_server,
                TargetServicer(loaded),
                target_pb2.DESCRIPTOR.services_by_name["TargetService"],
            )
        )
    return registrations


def _stdin_closed(watch: bool) -> asyncio.Event:
    """Set when standard input ends, which it does when the process that started us is gone, however it went."""
    event = asyncio.Event()
    if watch:
        loop = asyncio.get_running_loop()

        def wait() -> None:
            sys.stdin.buffer.read()
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        threading.Thread(target=wait, name="stdin", daemon=True).start()
    return event
