"""A model, ready to be used by sessions: loaded, its thread running, its noise keys computed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bridge.models import Model
from bridge.noise import Int64, token_keys
from bridge.sampling import Sampler, SamplingParameters
from services.engine.engine import Engine
from services.engine.scheduler import Scheduler
from services.model.files import ModelFiles, read_model_files


@dataclass(frozen=True)
class LoadedModel:
    """Everything that a model server's services share."""

    files: ModelFiles
    engine: Engine
    model: Model
    scheduler: Scheduler

    @cached_property
    def _keys(self) -> Int64:
        return token_keys(self.model.vocabulary, self.model.special_ids.eos)

    @cached_property
    def _allowed(self) -> NDArray[np.bool_]:
        return np.array([data is not None for data in self.model.vocabulary.tokens])

    def warm(self) -> None:
        """Computes what would make the first request slow."""
        self.sampler(SamplingParameters(), 0)

    def sampler(self, parameters: SamplingParameters, seed: int, logprobs: int | None = None) -> Sampler:
        """A sampler over the model's vocabulary. Raises `InvalidField`."""
        parameters.checked(self.model.has)
        ends = parameters.ends(self.model.special_ids.eos)
        tolerance = self.engine.logit_tolerance
        return Sampler(parameters, seed, self._keys, self._allowed, ends, logprobs, tolerance)


def load(directory: Path, name: str, open_engine: Callable[[], Engine], queue_limit: int = 64) -> LoadedModel:
    """Puts a model's parts together. `open_engine` is called in the thread that runs it; see `Scheduler`."""
    files = read_model_files(directory)
    scheduler = Scheduler(open_engine, queue_limit)
    model = files.describe(name, scheduler.engine)
    loaded = LoadedModel(files, scheduler.engine, model, scheduler)
    loaded.warm()
    return loaded
