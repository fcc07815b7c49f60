"""The registry of engines: lists them, chooses one for a model, and prepares models for one.

To add an engine, implement `services.engines.engine.Engine`, write an `EngineSpec` in a new file or folder, and add the
spec to `_OWN`. A separately installed package names its spec as an entry point instead::

    [project.entry-points."draftbridge.engines"]
    mine = "my_package.spec:MINE"
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from bridge.errors import InvalidField
from services.engines.habana.spec import HABANA
from services.engines.ik_llama.spec import IK_LLAMA
from services.engines.llamacpp.spec import LLAMACPP
from services.engines.openvino.spec import OPENVINO
from services.engines.spec import EngineOptions, EngineSpec, Weights
from services.engines.torch.spec import TORCH
from services.store.cache import Report

# Usually fastest first (docs/measurements/engines.md). Of those that support the options, `--engine auto` takes the
# first whose `reason_to_skip` returns "", or the fastest of those that read the same files.
_OWN = (LLAMACPP, IK_LLAMA, OPENVINO, HABANA, TORCH)
AUTO = "auto"
# Chooses among engines for a model; None if none of them runs it.
Selection = Callable[[Sequence[EngineSpec], str, EngineOptions], EngineSpec | None]


@cache
def engines() -> dict[str, EngineSpec]:
    """Returns all engine specs by name: those of this package, then those of other installed packages."""
    others = (entry_point.load() for entry_point in entry_points(group="draftbridge.engines"))
    return {spec.name: spec for spec in (*_OWN, *others)}


def engine_spec(name: str) -> EngineSpec:
    """Returns the spec with this name. Raises `InvalidField`."""
    found = engines().get(name)
    if found is None:
        raise InvalidField("--engine", f"one of {', '.join((AUTO, *engines()))}", repr(name))
    return found


def choose_engine(
    name: str, model: str, options: EngineOptions, fastest: Selection = lambda rivals, model, options: rivals[0]
) -> tuple[EngineSpec, EngineOptions]:
    """Returns the spec for a model and the options to open it with, both chosen here if `name` is "auto".

    `fastest` then chooses among engines that read the same files on the CPU; see `services.engines.trial`. If none of
    them runs the model, engines that read other files are tried.
    Raises `InvalidField` for an unknown engine or options that it does not support, `UnusableModel` for an engine that
    is not installed.
    """
    if name != AUTO:
        spec = engine_spec(name)
    else:
        able = [one for one in engines().values() if one.supports(options)]
        usable = [one for one in able if not one.reason_to_skip(model, options)]
        if not usable:  # the first engine that could run the model raises its reason, which names the remedy
            installed = [one for one in engines().values() if one.installed and (one.trusts or not options.trusted)]
            usable = [one for one in installed if not one.reason_to_skip(model, options)][:1]
        spec = _first_that_runs(usable, model, options, fastest)
        if options.weights is Weights.AUTO:
            options = replace(options, weights=spec.auto_weights)
    spec.check(options)
    return spec, options


def _first_that_runs(
    usable: Sequence[EngineSpec], model: str, options: EngineOptions, fastest: Selection
) -> EngineSpec:
    kinds = list(dict.fromkeys(one.reads for one in usable))
    for kind in kinds:
        rivals = [one for one in usable if one.reads == kind]
        if (len(rivals) == 1 and kind == kinds[-1]) or not options.on_cpu:
            return rivals[0]
        if found := fastest(rivals, model, options):
            return found
    return usable[0]  # whose own error says why


def follows(name: str, model: str, options: EngineOptions) -> bool:
    """Returns whether this process only computes a part of a model that another process serves."""
    own = [one for one in engines().values() if one.follows()]
    return any(one.name == name or (name == AUTO and not one.reason_to_skip(model, options)) for one in own)


def prepare(name: str, model: str, options: EngineOptions, report: Report) -> Path:
    """Downloads and converts a model for one engine. Returns the path to open. Raises a `DraftBridgeError`."""
    if name == AUTO:
        raise InvalidField("--engine", "one engine, because auto depends on the options of serve", AUTO)
    spec = engine_spec(name)
    spec.check(options)
    return spec.prepare(model, options, report)
