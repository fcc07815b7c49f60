"""Whether an engine does what the model does: tried with a few tokens, before it is served."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.engines.engine import Engine, Row

# Tokens of each text, of the beginning that both share, and of the part whose logits are not asked for.
_LENGTH, _SHARED, _READ = 16, 4, 8
# An engine's logits may move twice as far as the model's own do when each of its parts is off by one unit in the last
# place. In bfloat16 they were seen to move 0.3 times (SmolLM2-135M, Gemma-3-270M), 0.5 times (Qwen2.5-Coder-0.5B) and
# 0.9 times (1.5B) as far.
_NOISES = 2.0
# Rounding in float32 is far below this, and what an engine may get wrong far above.
_LEAST_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Proof:
    """Two texts that begin alike, and the model's own logits after each token: [texts, tokens, vocabulary size].

    `tolerance`: how far an engine's logits may be from them, as `_distance` measures it.
    """

    texts: tuple[tuple[int, ...], tuple[int, ...]]
    expected: NDArray[np.float32]
    tolerance: float

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any) -> "Proof":
        """By attention of the model's own, in its own dtype.

        The texts are sampled from the model: on random ids some models are so ill-conditioned that rounding to
        bfloat16 moves logits as far as a wrong mask does. The tolerance follows from what rounding does to the model.
        """
        texts = _sampled(model)
        expected = _logits(model, texts)
        with _rounded_otherwise(model):
            noise = _distance(_logits(model, texts), expected)
        one, other = (tuple(text) for text in texts)
        return cls((one, other), expected, max(_LEAST_TOLERANCE, _NOISES * noise))

    def check(self, engine: Engine) -> None:
        """Raises ValueError if logits differ by more than they may.

        Two rows of different lengths, cut in pieces, with a rejected token in between and a copied slot, must give
        the logits that the model gives without any of it.
        """
        text, other = self.texts
        engine.forward([Row(0, 0, (*text[:_READ], other[_READ]), _READ)])
        rows = [Row(0, _READ, text[_READ:], 0)]
        if engine.slot_count > 1:
            engine.copy(0, 1, _SHARED)
            rows.append(Row(1, _SHARED, other[_SHARED:], 0))
        for row, logits, own in zip(rows, engine.forward(rows), self.expected, strict=False):
            error = _distance(logits, own[row.keep :])
            if not error < self.tolerance:
                raise ValueError(f"logits differ by {error:.1%} from the model's own, {self.tolerance:.1%} is rounding")


def _sampled(model: Any) -> list[list[int]]:
    """Two texts that the model might write, with the same beginning."""
    generator = torch.Generator().manual_seed(0)
    size = min(int(model.get_output_embeddings().weight.shape[0]), 1000)
    first = int(torch.randint(size, (1,), generator=generator))
    texts, cache = [[first], [first]], None
    while len(texts[0]) < _LENGTH:
        newest = torch.tensor([text[-1:] for text in texts], device=model.device)
        found = model(newest, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        weights = torch.softmax(found.logits[:, -1].float().cpu(), dim=1)
        one, other = torch.multinomial(weights, 1, generator=generator).flatten().tolist()
        texts[0].append(one)
        texts[1].append(one if len(texts[1]) < _SHARED else other)
    return texts


def _logits(model: Any, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """[texts, tokens, vocabulary size]"""
    found: NDArray[np.float32] = (
        model(torch.tensor(texts, device=model.device), use_cache=False).logits.float().cpu().numpy()
    )
    return found


def _distance(logits: NDArray[np.float32], own: NDArray[np.float32]) -> float:
    """The norm of the difference over that of the model's own.

    Both without their mean over the vocabulary, which changes no probability.
    """
    moved, centred = (table - table.mean(axis=-1, keepdims=True) for table in (logits - own, own))
    return float(np.linalg.norm(moved) / np.linalg.norm(centred))


@contextmanager
def _rounded_otherwise(model: Any) -> Iterator[None]:
    """Moves what each innermost part of a model returns at random, by up to one unit in the last place."""
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
