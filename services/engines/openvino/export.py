"""Exports a transformers directory: `python -m services.engines.openvino.export MODEL DIRECTORY WEIGHTS`.

Writes `model.xml` and `model.bin`, with weights "full" (float32), "int8" or "int4" (by NNCF). The traced model must
pass the engine self-test in float32 before its weights are quantized.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from openvino.frontend.pytorch import ConversionExtension

from bridge.errors import UnusableModel
from services.engines.engine import CONTEXT_STEP
from services.engines.openvino.engine import OpenVinoEngine
from services.engines.openvino.graph import INPUTS, AttentionSpec, placeholder
from services.engines.selftest import SelfTest, narrowed
from services.engines.torch.attention import ATTENTION, OPERATOR, Scoring, using
from services.engines.torch.model import TokenLogits, context_limit, load_model

# Number of int4 weights that share a scale.
_INT4_GROUP = 64


class _Recorder:
    """Implements `Attention`: records the parameters of each layer's attention."""

    def __init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Returns zeros in the shape of `Attention.attend`. Raises `UnusableModel`."""
        if scoring.softcap is not None or scoring.sinks is not None:
            raise UnusableModel(
                "the openvino engine does not support attention with softcap or sinks (Gemma 2, GPT-OSS): use torch"
            )
        heads, key_heads = query.shape[1], key.shape[1]
        sizes = (key.shape[3], value.shape[3])
        self.specs[layer] = AttentionSpec(layer, heads, key_heads, *sizes, scoring.window, scoring.scaling)
        return query.new_zeros(1, query.shape[2], heads, value.shape[3])


def export(source: Path, destination: Path, weights: str) -> None:
    """Writes the model of `source` into the new directory `destination`. Raises `UnusableModel`."""
    model = load_model(source, torch.float32).eval()
    with narrowed(model) as wide:
        if wide:
            _checked(model)
    graph = _checked(model)
    destination.mkdir()
    small = _compressed(graph, weights)
    small.set_rt_info(weights, ["draftbridge", "weights"])
    ov.save_model(small, destination / "model.xml", compress_to_fp16=False)


def _checked(model: Any) -> ov.Model:
    """Returns the traced model. Raises ValueError if it fails the self-test."""
    model.set_attn_implementation("eager")
    self_test = SelfTest.of(model)
    graph = _traced(model)
    # The engine inserts its attention into a copy, so that the saved file does not contain it. The self-test needs few
    # positions, so that any memory is enough.
    tested = graph.clone()
    limit = min(CONTEXT_STEP, context_limit(model.config.get_text_config()))
    tested.set_rt_info(limit, ["draftbridge", "context_length"])
    self_test.check(OpenVinoEngine(tested, dtype="float32", slot_count=2, cache_byte_limit=1 << 40))
    return graph


def _traced(model: Any) -> ov.Model:
    model.set_attn_implementation(ATTENTION)
    recorder = _Recorder()
    example = (torch.arange(1, 6), torch.arange(5), torch.tensor([3, 4]))

    def convert(context: Any) -> list[Any]:
        query, key, value = (context.get_input(index) for index in range(3))
        spec = recorder.specs[context.get_values_from_const_input(3)]
        return [placeholder(query, key, value, spec).output(0)]

    logits = TokenLogits(model)
    # Users cannot act on the warnings of tracing, and the self-test checks the result.
    with using(recorder), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits(*example)
        graph = ov.convert_model(logits, example_input=example, extension=[ConversionExtension(OPERATOR, convert)])
    for parameter, name in zip(graph.inputs, INPUTS, strict=True):
        parameter.get_tensor().set_names({name})
    graph.set_rt_info("full", ["draftbridge", "weights"])
    graph.set_rt_info(context_limit(model.config.get_text_config()), ["draftbridge", "context_length"])
    return graph


def _compressed(graph: ov.Model, weights: str) -> ov.Model:
    if weights == "full":
        return graph
    import nncf

    if weights == "int8":
        return nncf.compress_weights(graph)
    adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    return nncf.compress_weights(
        graph, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=_INT4_GROUP, ratio=1.0, advanced_parameters=adjust
    )


if __name__ == "__main__":
    try:
        export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except UnusableModel as error:
        sys.exit(str(error))
    except Exception as error:  # the libraries raise errors of many types for models that they cannot export
        sys.exit(f"{type(error).__name__}: {str(error)[:500]}")
