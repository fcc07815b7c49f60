"""Whether an engine does what the model does: tried with a few tokens, before it is served."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.engine import Engine, Row


@dataclass(frozen=True)
class Proof:
    """Two texts that begin alike, and the model's own logits behind each: [vocabulary size]."""

    texts: tuple[tuple[int, ...], tuple[int, ...]]
    expected: Sequence[NDArray[np.float32]]

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any) -> "Proof":
        """By attention of the model's own."""
        size = min(int(model.get_output_embeddings().weight.shape[0]), 1000)
        ids = tuple(torch.randint(size, (15,), generator=torch.Generator().manual_seed(0)).tolist())
        texts = (ids[:12], ids[:3] + ids[12:])
        inputs = [torch.tensor([text], device=model.device) for text in texts]
        return cls(texts, [model(one, use_cache=False).logits[0, -1].float().cpu().numpy() for one in inputs])

    def check(self, engine: Engine, tolerance: float) -> None:
        """Raises ValueError if logits differ by more than this part of their norm.

        Two rows of different lengths, cut in pieces, with a rejected token in between and a copied slot, must give
        the logits that the model gives without any of it.
        """
        text, other = self.texts
        engine.forward([Row(0, 0, (*text[:7], 1), 7)])
        rows = [Row(0, 7, text[7:], 4)]
        if engine.slot_count > 1:
            engine.copy(0, 1, 3)
            rows.append(Row(1, 3, other[3:], 2))
        for logits, reference in zip(engine.forward(rows), self.expected, strict=False):
            error = float(np.linalg.norm(logits[-1] - reference) / np.linalg.norm(reference))
            if not error < tolerance:
                raise ValueError(f"logits differ by {error:.0%} from the model's own")
