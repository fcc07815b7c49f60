"""The registry of engines. Everything that lists engines or chooses one asks here.

To add an engine, write a class like `services.engines.engine.Engine` and an `EngineSpec` in a file or folder of its
own, and add the spec to `_OWN`. A package that is installed separately names its spec as an entry point instead::

    [project.entry-points."draftbridge.engines"]
    mine = "my_package.spec:MINE"
"""

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from bridge.errors import InvalidField
from services.engines.ik_llama.spec import IK_LLAMA
from services.engines.llamacpp.spec import LLAMACPP
from services.engines.openvino.spec import OPENVINO
from services.engines.spec import EngineOptions, EngineSpec, Weights
from services.engines.torch.spec import TORCH
from services.store.cache import Report

# `--engine auto` takes the first of these that does not pass a model over: the fastest first, see docs/engines.md.
_OWN = (LLAMACPP, IK_LLAMA, OPENVINO, TORCH)
AUTO = "auto"


@cache
def engines() -> dict[str, EngineSpec]:
    """Returns all engines by name: those of this package, then those of other installed packages."""
    others = (entry_point.load() for entry_point in entry_points(group="draftbridge.engines"))
    return {spec.name: spec for spec in (*_OWN, *others)}


def engine_spec(name: str) -> EngineSpec:
    """Returns the engine of that name. Raises `InvalidField`."""
    found = engines().get(name)
    if found is None:
        raise InvalidField("--engine", f"one of {', '.join((AUTO, *engines()))}", repr(name))
    return found


def choose_engine(name: str, model: str, options: EngineOptions) -> tuple[EngineSpec, EngineOptions]:
    """Returns the engine for a model, with `name` resolved if it is "auto", and the options, checked.

    Raises `InvalidField` for an engine that does not exist or options that it does not have, `UnusableModel` for an
    engine that is not installed.
    """
    if name != AUTO:
        spec = engine_spec(name)
    else:
        spec = next(one for one in engines().values() if one.installed and not one.passed_over(model, options))
        if options.weights is Weights.AUTO:
            options = replace(options, weights=spec.auto_weights)
    spec.check(options)
    return spec, options


def prepare(name: str, model: str, weights: Weights, report: Report) -> Path:
    """Fetches and converts a model for one engine, and returns what it reads. Raises what `choose_engine` raises."""
    if name == AUTO:
        raise InvalidField("--engine", "one engine: which is the fastest depends on how the model is served", AUTO)
    spec = engine_spec(name)
    spec.check(EngineOptions(weights=weights))
    return spec.prepare(model, weights, report)
