"""Loads a model and starts its thread, so that sessions can use it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bridge.sampling.noise import Int64, token_keys
from bridge.sampling.sampler import Sampler, SamplingParameters
from bridge.text.models import Model
from services.engines.engine import Engine
from services.engines.observer import UNOBSERVED, SchedulerObserver
from services.engines.scheduler import Scheduler
from services.store.files import ModelFiles, read_model_files, stated_vocabulary_size


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model and its scheduler, which all services of a model server share."""

    files: ModelFiles
    engine: Engine
    model: Model
    scheduler: Scheduler

    @cached_property
    def _keys(self) -> Int64:
        return token_keys(self.model.vocabulary, self.model.special_ids.eos)

    @cached_property
    def _missing(self) -> Int64:
        return np.array(sorted(self.model.vocabulary.missing), np.int64)

    def warm(self) -> None:
        """Computes the noise keys, which would delay the first request. A copy of this object has none of them."""
        self.sampler(SamplingParameters(), 0)

    def sampler(
        self, parameters: SamplingParameters, seed: int, logprobs: int | None = None, *, confident: bool = False
    ) -> Sampler:
        """Returns a `Sampler` over the model's vocabulary, for parameters that were checked."""
        ends = parameters.ends(self.model.special_ids.eos)
        tolerance = self.engine.logit_tolerance
        return Sampler(parameters, seed, self._keys, self._missing, ends, logprobs, tolerance, confident)


def load(
    directory: Path,
    name: str,
    open_engine: Callable[[], Engine],
    queue_limit: int = 64,
    observer: SchedulerObserver = UNOBSERVED,
) -> LoadedModel:
    """Loads the model `directory` under a name. The scheduler's thread calls `open_engine`; see `Scheduler`.

    Raises `UnusableModel` for files that do not belong together or cannot be read.
    """
    files = read_model_files(directory)
    if stated := stated_vocabulary_size(directory):
        files.check_size(stated, directory, "config.json")  # before the weights, which can take minutes
    scheduler = Scheduler(open_engine, queue_limit, observer)
    files.check_size(scheduler.engine.vocabulary_size, directory)
    model = files.describe(name, scheduler.engine.context_length, scheduler.engine.vocabulary_size)
    return LoadedModel(files, scheduler.engine, model, scheduler)
