"""The engine self-test: compares an engine's logits with the model's own on a few tokens, before it serves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.engine import Engine, Row

# Tokens of each text, of the beginning that both share, and of the first text's part that runs without logits.
LENGTH, _SHARED, _READ = 16, 4, 8
# Tokens of a narrowed attention window: not a multiple of anything that an engine divides a text by.
_NARROW = 6
_PROSE = (
    "The first steam engines pumped water out of mines. By 1830 they drew trains from one city to another, and people "
    "began to ask how fast a human being could travel."
)
# An engine's logits may differ from the model's own by this factor times the rounding noise: the change of the model's
# logits if the output of each part is changed by up to one unit in the last place. Differences measured in bfloat16,
# relative to that noise: 0.6 (SmolLM2-135M), 0.7 and, with narrowed windows, 0.9 (Gemma-3-270M), 0.9
# (Qwen2.5-Coder-1.5B).
_NOISE_FACTOR = 2.0
# Rounding in float32 causes far smaller differences than this, and an error in an engine far larger ones. An engine
# that is wrong by more than the latter is refused even if the model's own logits are mostly noise.
_MIN_TOLERANCE, _MAX_TOLERANCE = 1e-3, 0.5


class LogitsDiffer(ValueError):
    """An engine's logits are not the model's own."""


@dataclass(frozen=True)
class SelfTest:
    """Two texts with the same beginning, and the model's own logits for them: [texts, tokens, vocabulary size].

    It sees attention windows of less than 16 tokens, so models with larger ones are tested `narrowed`, too.

    `tolerance`: the largest allowed `distance` of an engine's logits from them.
    """

    texts: tuple[tuple[int, ...], tuple[int, ...]]
    expected: NDArray[np.float32]
    tolerance: float

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, texts: Sequence[Sequence[int]] = ()) -> "SelfTest":
        """Computes the self-test of a transformers model with the model's own attention and dtype.

        `texts`: those of another self-test of it; to make them, its tokenizer is read, which may take seconds.

        On random ids, some models are so ill-conditioned that rounding to bfloat16 changes logits as much as a wrong
        mask does, so the texts are prose. The tolerance follows from the model's rounding noise.
        Raises `UnusableModel` if the model's own logits are not numbers.
        """
        texts = texts or _texts(model)
        with _scores_in_range(model, texts):
            expected = _logits(model, texts)
            with _perturbed(model):
                noise = distance(_logits(model, texts), expected)
        one, other = (tuple(text) for text in texts)
        return cls((one, other), expected, min(max(_MIN_TOLERANCE, _NOISE_FACTOR * noise), _MAX_TOLERANCE))

    def check(self, engine: Engine, widths: Sequence[int] = ()) -> None:
        """Raises `LogitsDiffer` if the engine's logits differ from the model's own by more than the tolerance.

        Covers two rows of different lengths in a forward, a text in two parts, a rejected token and a copied slot.
        `widths`: for each, that number of the first text's last tokens run again in a forward of their own.
        """
        text, other = self.texts
        engine.forward([Row(0, 0, (*text[:_READ], other[_READ]), _READ + 1)])
        rows = [Row(0, _READ, text[_READ:], 0)]
        if engine.slot_count > 1:
            engine.copy(0, 1, _SHARED)
            rows.append(Row(1, _SHARED, other[_SHARED:], 0))
        for row, logits, own in zip(rows, engine.forward(rows), self.expected, strict=False):
            self._compare(logits, own[row.keep :])
        for start in (max(LENGTH - width, 0) for width in widths):
            (logits,) = engine.forward([Row(0, start, text[start:], 0)])
            self._compare(logits, self.expected[0][start:])

    def _compare(self, logits: Logits, own: Logits) -> None:
        error = distance(logits, own)
        if not error < self.tolerance:
            raise LogitsDiffer(f"logits differ by {error:.1%} from the model's own, allowed is {self.tolerance:.1%}")


@contextmanager
def narrowed(model: Any) -> Iterator[bool]:
    """Narrows a transformers model's attention windows, so that the texts of a self-test exceed them.

    transformers reads their size in each forward. Yields whether there are any that the texts do not exceed by
    themselves.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if wide := isinstance(window, int) and window >= LENGTH:
        config.sliding_window = _NARROW
    try:
        yield wide
    finally:
        if wide:
            config.sliding_window = window


def _texts(model: Any) -> list[list[int]]:
    """Returns two texts with the same beginning: prose, begun as the tokenizer begins each text; else random ids."""
    size = int(model.get_input_embeddings().weight.shape[0])
    file, ids = Path(model.name_or_path) / "tokenizer.json", list[int]()
    with suppress(Exception):  # also where the tokenizer has no words for prose
        ids = Tokenizer.from_file(str(file)).encode(_PROSE).ids[: 2 * LENGTH - _SHARED]
    if len(set(ids)) < LENGTH or max(ids) >= size:
        generator = torch.Generator().manual_seed(0)
        others = torch.randint(min(size, 1000), (2 * LENGTH,), generator=generator).tolist()
        ids = [id_ for id_ in ids[:1] if id_ < size] + others
    return [ids[:LENGTH], ids[:_SHARED] + ids[LENGTH : 2 * LENGTH - _SHARED]]


@contextmanager
def _scores_in_range(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Lets a model in float16 use attention that scales scores in time, if its own does not.

    transformers' eager attention multiplies queries by keys before it scales the products, and some exceed float16's
    range in healthy models (Qwen2.5-Coder-1.5B).
    """
    own = model.config._attn_implementation
    exceeded = False
    if model.dtype is torch.float16 and own == "eager" and getattr(model, "_supports_sdpa", False):
        logits = model(torch.tensor(texts, device=model.device), use_cache=False).logits
        exceeded = not bool(torch.isfinite(logits).all())
    if exceeded:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if exceeded:
            model.set_attn_implementation(own)


def _logits(model: Any, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Returns the model's logits [texts, tokens, vocabulary size]."""
    return _finite(model(torch.tensor(texts, device=model.device), use_cache=False).logits, model)


def _finite(logits: torch.Tensor, model: Any) -> NDArray[np.float32]:
    """Returns logits. Raises `UnusableModel` if some are not numbers, as where activations exceed float16's range."""
    found: NDArray[np.float32] = logits.float().cpu().numpy()
    if not np.isfinite(found).all():
        dtype = str(model.dtype).removeprefix("torch.")
        wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(dtype)
        damaged = "its weights are damaged"
        raise UnusableModel(
            f"this {model.config.model_type} model's logits are not numbers in {dtype}: "
            + (f"use --dtype {wider}; if that does not help, {damaged}" if wider else damaged),
            model_type=model.config.model_type,
        )
    return found


def distance(logits: NDArray[np.float32], own: NDArray[np.float32]) -> float:
    """Returns the norm of the difference, relative to the norm of the model's own logits.

    Subtracts the mean over the vocabulary from both, because it does not affect probabilities. Not a number if the
    logits of an engine are not.
    """
    with np.errstate(all="ignore"):
        # Scaled by a power of two, which is exact: the squares of large logits would overflow, which hides errors.
        _, exponent = np.frexp(max(own.max(), -own.min()))
        scaled = (np.ldexp(table, -exponent) for table in (logits - own, own))
        moved, centred = (table - table.mean(axis=-1, keepdims=True) for table in scaled)
        return float(np.linalg.norm(moved) / np.linalg.norm(centred))


@contextmanager
def _perturbed(model: Any) -> Iterator[None]:
    """Changes the output of each innermost module at random, by up to one unit in the last place."""
    generator: dict[torch.device, torch.Generator] = {}

    def move(module: torch.nn.Module, given: Any, found: Any) -> Any:
        if not (isinstance(found, torch.Tensor) and found.is_floating_point()):
            return found
        if found.device not in generator:
            generator[found.device] = torch.Generator(found.device).manual_seed(0)
        part = 2 * torch.rand(found.shape, device=found.device, generator=generator[found.device]) - 1
        return (found * (1 + torch.finfo(found.dtype).eps * part)).to(found.dtype)

    parts = [part for part in model.modules() if next(part.children(), None) is None]
    hooks = [part.register_forward_hook(move) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
