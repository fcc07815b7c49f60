"""The format of exported models: a placeholder for attention on disk, OpenVINO's paged attention in memory.

The placeholder concatenates the queries, keys and values of all tokens [tokens, features]. Its name has the parameters
of the attention. `with_attention` replaces it by paged attention, which stores keys and values in blocks and takes
concatenated rows of any lengths. That operator depends on the version of OpenVINO; the file does not.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from bridge.errors import UnusableModel

# The version of OpenVINO whose paged attention has the inputs of `_inputs`.
_VERSION = "2026.4"
_PREFIX = "draftbridge.attend "
INPUTS = ("token_ids", "positions", "wanted")
# Inputs that assign tokens to rows, and rows to blocks of keys and values.
BATCH_INPUTS = {
    "past_lens": [-1],
    "subsequence_begins": [-1],
    "block_indices": [-1],
    "block_indices_begins": [-1],
    "max_context_len": [],
}


@dataclass(frozen=True)
class AttentionSpec:
    """Parameters of one layer's attention: heads and their sizes, sliding window in tokens (0: none), score scaling."""

    layer: int
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    window: int
    scaling: float

    @property
    def name(self) -> str:
        """The name of the placeholder in the file, which contains all parameters."""
        return _PREFIX + json.dumps(asdict(self))


def cache_names(layer: int) -> tuple[str, str]:
    """Returns the names of the inputs that hold a layer's keys and values."""
    return f"key_cache.{layer}", f"value_cache.{layer}"


def placeholder(query: Any, key: Any, value: Any, spec: AttentionSpec) -> Any:
    """Builds the placeholder for attention: from [1, heads, tokens, size] to [1, tokens, heads, value size]."""

    def flat(node: Any, features: int) -> Any:
        turned = ops.transpose(node, ops.constant(np.array([0, 2, 1, 3])))
        return ops.reshape(turned, ops.constant(np.array([-1, features])), False)

    parts = (
        flat(query, spec.heads * spec.key_size),
        flat(key, spec.key_heads * spec.key_size),
        flat(value, spec.key_heads * spec.value_size),
    )
    together = ops.concat(parts, 1)
    together.set_friendly_name(spec.name)
    zero, one = ops.constant(np.array([0])), ops.constant(np.array([1]))
    # The result has the right shape, so that the file is a valid model.
    result = ops.slice(together, zero, ops.constant(np.array([spec.heads * spec.value_size])), one, one)
    return ops.reshape(result, ops.constant(np.array([1, -1, spec.heads, spec.value_size])), False)


def with_attention(model: ov.Model) -> list[AttentionSpec]:
    """Replaces all placeholders in a model by paged attention. Returns the parameters of its layers, in order.

    The model gains the inputs `BATCH_INPUTS`, and for each layer those of `cache_names`, whose shapes and types the
    device determines when it compiles the model. Raises `UnusableModel` for another version of OpenVINO.
    """
    version = ov.__version__
    if not version.startswith(_VERSION + "."):
        raise UnusableModel(
            f"OpenVINO {version} is not supported, its paged attention may differ: pip install 'openvino=={_VERSION}.*'"
        )
    batch = {name: _parameter(name, ov.Type.i32, shape) for name, shape in BATCH_INPUTS.items()}
    parameters, specs = list(batch.values()), []
    for node in model.get_ordered_ops():
        if not node.get_friendly_name().startswith(_PREFIX):
            continue
        spec = AttentionSpec(**json.loads(node.get_friendly_name().removeprefix(_PREFIX)))
        sizes = (spec.key_size, spec.value_size)
        caches = [
            _parameter(name, ov.Type.dynamic, [-1, spec.key_heads, -1, size])
            for name, size in zip(cache_names(spec.layer), sizes, strict=True)
        ]
        inputs = [one.get_source_output() for one in node.inputs()]
        attention = PagedAttention(_inputs(inputs, [cache.output(0) for cache in caches], batch, spec))
        # OpenVINO derives the shapes of the caches from these.
        notes = attention.get_rt_info()
        notes["num_k_heads"] = notes["num_v_heads"] = spec.key_heads
        notes["k_head_size"], notes["v_head_size"] = sizes
        for part in node.output(0).get_target_inputs():
            for user in part.get_node().output(0).get_target_inputs():
                user.replace_source_output(attention.output(0))
        parameters += caches
        specs.append(spec)
    model.add_parameters(parameters)
    model.validate_nodes_and_infer_types()
    return specs


def _parameter(name: str, kind: ov.Type, shape: list[int]) -> Any:
    parameter = ops.parameter(ov.PartialShape(shape), kind, name=name)
    parameter.get_output_tensor(0).set_names({name})
    return parameter


def _inputs(inputs: list[Any], caches: list[Any], batch: dict[str, Any], spec: AttentionSpec) -> list[Any]:
    """Returns the operator's inputs in its order. Empty constants turn features off."""

    def constant(kind: Any, values: Any) -> Any:
        return ops.constant(np.array(values, kind)).output(0)

    def off(kind: Any = np.int32, *shape: int) -> Any:
        return ops.constant(np.zeros(shape or (0,), kind)).output(0)

    zero = constant(np.int32, 0)
    return [
        *inputs,
        *caches,
        *(batch[name].output(0) for name in list(BATCH_INPUTS)[:4]),
        constant(np.float32, spec.scaling),
        constant(np.int32, spec.window),
        off(np.float32),  # slopes of ALiBi
        batch["max_context_len"].output(0),
        *(off(), off(), off(np.int32, 0, 0), off(np.float32, 0, 0)),  # sums of scores, rotation of cached keys
        *(off(np.float32), zero, zero),  # sparse attention
        off(np.float32, 0, 0, 0, 0),  # sinks
        *(zero, off(), off(), off()),  # eviction of similar blocks
        *(off(), off(np.uint8), off()),  # token types, trees of candidates
    ]
