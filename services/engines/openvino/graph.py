"""How a model is written down for OpenVINO, and how attention is put into it when it is read.

The graph on disk holds, in place of attention, what goes into it: the tokens' queries, keys and values side by side
[tokens, features], under a name that says what to do with them. `with_attention` puts OpenVINO's paged attention
there, which keeps keys and values in blocks and takes rows of any lengths behind one another. That operator belongs to
one version of OpenVINO; the file does not.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from bridge.errors import UnusableModel

# Which the list of the operator's inputs below was written for.
_VERSION = "2026.4"
_PREFIX = "draftbridge.attend "
INPUTS = ("token_ids", "positions", "wanted")
# What says which tokens belong to which row, and where the blocks of its keys and values are.
BATCH_INPUTS = {
    "past_lens": [-1],
    "subsequence_begins": [-1],
    "block_indices": [-1],
    "block_indices_begins": [-1],
    "max_context_len": [],
}


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: how many heads of what size, how far back it sees (0: all), what scores are scaled by."""

    layer: int
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    window: int
    scaling: float

    @property
    def name(self) -> str:
        """The node's name in the file."""
        return _PREFIX + json.dumps(asdict(self))


def cache_names(layer: int) -> tuple[str, str]:
    """The inputs that hold a layer's keys and values."""
    return f"key_cache.{layer}", f"value_cache.{layer}"


def placeholder(query: Any, key: Any, value: Any, spec: AttentionSpec) -> Any:
    """What stands for attention in the file; of [1, heads, tokens, size] makes [1, tokens, heads, value size]."""

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
    # Of the right shape, so that the file is a model that can be looked at.
    result = ops.slice(together, zero, ops.constant(np.array([spec.heads * spec.value_size])), one, one)
    return ops.reshape(result, ops.constant(np.array([1, -1, spec.heads, spec.value_size])), False)


def with_attention(model: ov.Model) -> list[AttentionSpec]:
    """Puts paged attention into a model as it was read; its layers, in order.

    The model then has the inputs `BATCH_INPUTS`, and for each layer those of `cache_names`, whose shapes and types the
    device decides when it is compiled. Raises `UnusableModel` for another version of OpenVINO.
    """
    version = ov.__version__
    if not version.startswith(_VERSION + "."):
        raise UnusableModel(
            f"this is OpenVINO {version}, whose paged attention may be another: pip install 'openvino=={_VERSION}.*'"
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
        # The device reads the caches' shapes from here.
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
    """The operator's inputs in its order; what is empty is not used."""

    def constant(kind: Any, values: Any) -> Any:
        return ops.constant(np.array(values, kind)).output(0)

    def none(kind: Any = np.int32, *shape: int) -> Any:
        return ops.constant(np.zeros(shape or (0,), kind)).output(0)

    zero = constant(np.int32, 0)
    return [
        *inputs,
        *caches,
        *(batch[name].output(0) for name in list(BATCH_INPUTS)[:4]),
        constant(np.float32, spec.scaling),
        constant(np.int32, spec.window),
        none(np.float32),  # slopes of ALiBi
        batch["max_context_len"].output(0),
        *(none(), none(), none(np.int32, 0, 0), none(np.float32, 0, 0)),  # sums of scores, turning of keys in the cache
        *(none(np.float32), zero, zero),  # leaving out blocks that matter little
        none(np.float32, 0, 0, 0, 0),  # sinks
        *(zero, none(), none(), none()),  # dropping blocks by how alike they are
        *(none(), none(np.uint8), none()),  # kinds of tokens, trees of candidates
    ]
