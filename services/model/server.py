"""A model server: loads one model and serves it until stopped."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bridge.errors import InvalidField
from bridge.sampling.sampler import SamplingParameters
from draftbridge.machine import compute_units
from draftbridge.v1 import draft_pb2, draft_pb2_grpc, model_pb2, model_pb2_grpc, target_pb2, target_pb2_grpc
from services.config import ModelServerConfig, Role
from services.engines import together
from services.engines.affinity import physical_core_count, pin
from services.engines.cpu import core_count, core_quota
from services.engines.engine import Engine, branching, measure, warm
from services.engines.fixed_width import as_served
from services.engines.huge_pages import use_huge_pages
from services.engines.observer import SchedulerObserver
from services.engines.openmp import bind_threads, limit_spinning
from services.engines.registry import AUTO, choose_engine
from services.engines.spec import EngineOptions
from services.engines.timing import Timing
from services.engines.trial import fastest
from services.grammars.store import TokenGrammars
from services.metrics import ModelMetrics
from services.model.draft.servicer import DraftServicer
from services.model.draft.session import DraftSession
from services.model.draft.suffix import SuffixModel, SuffixSession
from services.model.health import ModelHealth
from services.model.host import LoadedModel, load
from services.model.servicer import ModelServicer, describe
from services.model.target.servicer import TargetServicer
from services.model.target.session import TargetSession
from services.rpc import codec
from services.rpc.insight import Insight
from services.rpc.server import Server, stop_event, unless
from services.store.built_in import SUFFIX
from services.store.cache import Report
from services.store.resolve import default_name, resolve
from services.traces import NO_TRACES, Traces
from services.version import VERSION

_log = logging.getLogger(__name__)

# How long the present forward may take to end after the last call has ended.
_CLOSE_SECONDS = 10.0
# Widths of passes that a target runs once before it serves: as many candidates as a bridge sends, and one more.
_WARMED_WIDTHS = range(1, 26)


def run(
    config: ModelServerConfig,
    report: Report,
    on_start: Callable[[str], None],
    until_stdin_closes: bool = False,
    metrics: ModelMetrics | None = None,
    traces: Traces = NO_TRACES,
) -> None:
    """Loads a model and serves it until stopped. `report` receives each step, `on_start` the address."""
    limit_spinning()  # before anything loads torch
    metrics = metrics or ModelMetrics()
    insight = Insight(metrics, traces, config.channelz)
    if config.model == SUFFIX:
        _run_suffix_server(config, on_start, until_stdin_closes, insight)
        return
    options = pinned_options(config)
    bind_threads(options.device, options.threads, compiles=options.compile)
    serving = threading.Event()
    if until_stdin_closes:
        threading.Thread(target=_end_with_parent, args=(serving,), name="parent", daemon=True).start()
    drafts = config.role is Role.DRAFT
    selection = partial(fastest, report=report, drafts=drafts, deterministic=config.determinism)
    with together.loading():
        spec, options = choose_engine(config.engine, config.model, options, selection)
        if options.device != "auto":
            spec.check_device(options.device)
        path = spec.prepare(config.model, options, report)
        directory = resolve(config.model, report, weights="")  # for the tokenizer
    if config.engine == AUTO:
        report(f"engine of {config.model}: {spec.name}")

    if spec.follows():
        spec.open(path, options)

    async def serve() -> None:
        stop = stop_event(until_stdin_closes)  # first, because an interrupted server cannot be deleted cleanly
        serving.set()
        server = Server(config.listen, config, insight)
        # In a thread, so that a signal is handled meanwhile.
        opening = partial(spec.open, path, options)
        loaded = await unless(stop.wait(), asyncio.to_thread(_load, config, opening, directory, report, metrics))
        if loaded is None:
            # A thread cannot be cancelled; it would keep the process until the model is read.
            os._exit(0)
        metrics.watch(loaded.scheduler)
        grammars = register(server, loaded, config.role)
        await server.run_until(stop, on_start, _health(config, loaded))
        grammars.close()
        if not loaded.scheduler.close(_CLOSE_SECONDS):
            # A forward that hangs, perhaps in a driver, cannot be ended otherwise.
            os._exit(1)

    asyncio.run(serve())


def _end_with_parent(serving: threading.Event) -> None:
    """Ends this process with the one that has started it, as long as it chooses an engine or converts a model.

    What it has not written completely is not used later.
    """
    while os.read(0, 1 << 16):  # not through sys.stdin, see `stop_event`
        pass
    if not serving.is_set():
        os._exit(0)


def _health(config: ModelServerConfig, loaded: LoadedModel) -> ModelHealth:
    width, taken_ns = loaded.model.forward_costs[-1] if loaded.model.forward_costs else (1, 0)
    return ModelHealth(loaded.scheduler, config.forward_limit, taken_ns / width)


def pinned_options(config: ModelServerConfig) -> EngineOptions:
    """Pins this process to the configured cores. Returns the engine's options, with one thread for each of them.

    A container whose processor time is limited to less than its physical cores gets as many threads as that; others
    have the engine's own number.
    """
    if config.cpu_affinity:
        pin(config.cpu_affinity)
    quota = core_quota()
    limited = quota is not None and quota < physical_core_count()
    if config.threads or not (config.cpu_affinity or limited):
        return config.options
    return replace(config.options, threads=core_count())


@together.loading()
def _load(
    config: ModelServerConfig,
    opening: Callable[[], Engine],
    directory: Path,
    report: Report,
    observer: SchedulerObserver,
) -> LoadedModel:
    timings: list[tuple[int, Timing]] = []

    def open_engine() -> Engine:
        plain: Timing | None = None
        opened = opening()
        if opened.device == "cpu":
            use_huge_pages()
        engine = as_served(opened, config.determinism)
        with together.measuring():
            if engine is not opened:
                ((_, plain),) = measure(opened, all_logits=True, widths=(1,))
            elif config.role is not Role.DRAFT:
                warm(engine, _WARMED_WIDTHS)
            timings.extend(measure(engine, all_logits=config.role is not Role.DRAFT))
        single = timings[0][1]
        if plain and not (plain.disturbed or single.disturbed):
            ratio = single.taken_ns / plain.taken_ns
            report(f"with --deterministic, a pass over one token takes {ratio:.2f} times as long")
        return engine

    loaded = load(directory, config.name or default_name(config.model), open_engine, config.queue, observer)
    units, unit_count = compute_units(loaded.engine.device, config.threads or core_count())
    model = replace(
        loaded.model,
        forward_costs=_undisturbed(timings),
        compute_units=units,
        compute_unit_count=unit_count,
        branches=branching(loaded.engine) is not None,
    )
    served = replace(loaded, model=model)
    served.warm()
    return served


def _undisturbed(timings: Sequence[tuple[int, Timing]]) -> tuple[tuple[int, int], ...]:
    """Returns the costs that were measured without other work; none without that of one token."""
    costs = tuple((width, timing.taken_ns) for width, timing in timings if not timing.disturbed)
    if costs and costs[0][0] == timings[0][0]:
        return costs
    _log.warning(
        "other work kept the cores busy while the times of forwards were measured: bridges will find them out from the "
        "first requests"
    )
    return ()


def _run_suffix_server(
    config: ModelServerConfig, on_start: Callable[[str], None], until_stdin_closes: bool, insight: Insight
) -> None:
    """Serves prompt lookup as a draft. Raises `InvalidField` for another role."""
    if config.role is not Role.DRAFT:
        raise InvalidField("--role", f"draft with {SUFFIX}, which has no text of its own", config.role.value)
    if config.cpu_affinity:
        pin(config.cpu_affinity)
    suffix = SuffixModel(config.name or SUFFIX, config.slots)
    description = codec.write_model(
        suffix.model,
        revision="1",
        role=model_pb2.ROLE_DRAFT,
        engine="suffix",
        device="cpu",
        slot_count=suffix.slot_count,
        deterministic=True,
        server_version=VERSION,
    )

    async def draft(sampling: SamplingParameters, seed: int) -> SuffixSession:
        return suffix.open()

    async def serve() -> None:
        stop = stop_event(until_stdin_closes)
        server = Server(config.listen, config, insight)
        _register(
            server,
            ModelServicer(description, suffix.tokenizer_json),
            DraftServicer(suffix.model, draft),
            TargetServicer(suffix.model, None),
        )
        await server.run_until(stop, on_start)

    asyncio.run(serve())


def register(server: Server, loaded: LoadedModel, role: Role) -> TokenGrammars:
    """Adds a loaded model's services; see `_register`. Returns their grammars, to be closed after the server."""

    grammars = TokenGrammars(loaded.model)

    async def draft(sampling: SamplingParameters, seed: int) -> DraftSession:
        sampler = loaded.sampler(sampling, seed, confident=True)
        matcher = await grammars.open_draft(sampling.grammar) if sampling.grammar else None
        return DraftSession(loaded.model, loaded.scheduler, sampler, matcher)

    async def target(sampling: SamplingParameters, seed: int, logprobs: int | None) -> TargetSession:
        sampler = loaded.sampler(sampling, seed, logprobs)
        matcher = await grammars.open(sampling.grammar, sampler.ends) if sampling.grammar else None
        return TargetSession(loaded.model, loaded.scheduler, sampler, matcher=matcher)

    number = {Role.DRAFT: model_pb2.ROLE_DRAFT, Role.TARGET: model_pb2.ROLE_TARGET, Role.BOTH: model_pb2.ROLE_BOTH}
    _register(
        server,
        ModelServicer(describe(loaded, number[role]), loaded.files.tokenizer_json),
        DraftServicer(loaded.model, draft if role in (Role.DRAFT, Role.BOTH) else None),
        TargetServicer(loaded.model, target if role in (Role.TARGET, Role.BOTH) else None),
    )
    return grammars


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
