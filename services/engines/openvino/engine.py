"""Runs models that `services.engines.openvino.export` wrote, on Intel CPUs and GPUs.

Keys and values are stored in blocks of tokens; each slot has its own consecutive blocks. Each forward passes how many
of a slot's tokens are valid, so a rollback passes a smaller number. Rows of any lengths, in any slots, share a forward.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.cpu import core_count
from services.engines.engine import Row, by_row, check, check_copy, slot_room
from services.extras import install_extra
from services.store.cache import remedy_for

try:
    import openvino as ov

    from services.engines.openvino.graph import cache_names, with_attention
except ImportError as error:
    raise UnusableModel(
        f"the openvino engine is not installed, or in another version ({error}): "
        f"{install_extra('openvino')}, or use --engine torch"
    ) from error

from services.engines.openvino.padding import Padding, measured_budget

# Measured: how much the difference of a position's two best logits varied over widths 1 to 16 on SmolLM2-135M and
# Gemma-3-270M. At most 0.375 in bfloat16; 0.46 and 1.91 with int8 and int4 weights, which round activations to 8 bits.
_TOLERANCES = {"f32": 1e-4, "bf16": 0.75, "f16": 0.1}
_QUANTIZED_TOLERANCES = {"int8": 0.5, "int4": 2.0}
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVinoEngine:
    """A converted model: the path of its `model.xml`, or the model in memory.

    `device`: "auto" (the CPU), "cpu", "gpu", "gpu.1". `dtype`: data type to compute in; on CPUs "auto" uses 8-bit
    activations with int8 and int4 weights, else bfloat16 if the CPU supports it. `threads`: CPU threads.
    `cache_byte_limit`: memory for the keys and values of all slots, in bytes. Raises `UnusableModel`.
    """

    name = "openvino"

    def __init__(
        self,
        model: Path | ov.Model,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        slot_count: int = 8,
        cache_byte_limit: int = 2 << 30,
    ) -> None:
        core = ov.Core()
        target = find_device(device, core)
        graph = _read(core, model) if isinstance(model, Path) else model
        weights = str(graph.get_rt_info(["draftbridge", "weights"]).value)
        limit = int(graph.get_rt_info(["draftbridge", "context_length"]).value)
        # "gpu" is llama.cpp's name of its GPU, so Intel's has a number even if it is the only one.
        self.device, self.slot_count = "gpu.0" if target == "GPU" else target.lower(), slot_count
        precision, options = _options(core, target, dtype, weights, threads)
        self.dtype = {kind: name for name, kind in _DTYPES.items()}[precision] if weights == "full" else weights
        quantized = weights != "full" and dtype == "auto"
        self.logit_tolerance = _QUANTIZED_TOLERANCES[weights] if quantized else _TOLERANCES[precision]
        layers = with_attention(graph)
        try:
            self._compiled = core.compile_model(graph, target, options)
        except RuntimeError as error:
            raise UnusableModel(
                f"OpenVINO cannot run this model on {target} ({' '.join(str(error).split())[-300:]}): use --device "
                "cpu, or --engine torch"
            ) from error
        self.vocabulary_size = int(self._compiled.output(0).partial_shape[1].get_length())
        self._request = self._compiled.create_infer_request()
        names = [name for spec in layers for name in cache_names(spec.layer)]
        self._make_room(names, limit, cache_byte_limit)
        self._padding = Padding(0)
        if self.device == "cpu":
            self._padding = Padding(measured_budget(self))

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        counts = [len(row.token_ids) for row in rows]
        fillers = self._padding.pad(rows, self.context_length)
        counts[-1] += fillers
        begins = np.cumsum([0, *counts])
        lengths = [row.keep + count for row, count in zip(rows, counts, strict=True)]
        blocks = [self._blocks(row.slot, length) for row, length in zip(rows, lengths, strict=True)]
        pairs = list(zip(rows, begins, strict=False))
        wanted = [begin + index for row, begin in pairs for index in range(row.logits_from, len(row.token_ids))]
        self._request.infer(
            {
                "token_ids": np.array([id_ for row in rows for id_ in row.token_ids] + [0] * fillers),
                "positions": np.concatenate([np.arange(row.keep, end) for row, end in zip(rows, lengths, strict=True)]),
                # At least one, because OpenVINO does not support an empty selection.
                "wanted": np.array(wanted or [0]),
                "past_lens": np.array([row.keep for row in rows], np.int32),
                "subsequence_begins": begins.astype(np.int32),
                "block_indices": np.concatenate(blocks),
                "block_indices_begins": np.cumsum([0, *map(len, blocks)]).astype(np.int32),
                "max_context_len": np.array(max(lengths), np.int32),
            },
            share_inputs=True,
        )
        return by_row(self._request.get_output_tensor(0).data[: len(wanted)], rows)

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        check_copy(self, source, target, token_count)
        count = len(self._blocks(source, token_count))
        for tensor in self._caches:
            shape = list(tensor.shape)[1:]
            parts = [
                ov.Tensor(tensor, [start, 0, 0, 0], [start + count, *shape])
                for start in (source * self._slot_blocks, target * self._slot_blocks)
            ]
            parts[0].copy_to(parts[1])

    def _blocks(self, slot: int, length: int) -> NDArray[np.int32]:
        """Returns the blocks of the first `length` tokens of a slot."""
        start = slot * self._slot_blocks
        return np.arange(start, start + -(-length // self._block), dtype=np.int32)

    def _make_room(self, names: Sequence[str], limit: int, cache_byte_limit: int) -> None:
        shapes = {}
        for one in self._compiled.inputs:
            if one.get_any_name() in names:
                shapes[one.get_any_name()] = (
                    one.get_element_type(),
                    [int(size.get_length()) for size in one.partial_shape[1:]],
                )
        # Shapes are [heads, tokens per block, size]; only the keys on GPUs are [heads, size, tokens per block].
        self._block = shapes[names[1]][1][1]
        block_bytes = sum(kind.size * int(np.prod(shape)) for kind, shape in shapes.values())
        room = slot_room(block_bytes // self._block, self.slot_count, cache_byte_limit, limit)
        self.context_length = min(limit, room)
        self._slot_blocks = -(-room // self._block)
        self.cache_byte_count = self._slot_blocks * self.slot_count * block_bytes
        self._caches = []
        for name, (kind, shape) in shapes.items():
            tensor = self._tensor(kind, [self._slot_blocks * self.slot_count, *shape])
            self._request.set_tensor(name, tensor)
            self._caches.append(tensor)

    def _tensor(self, kind: ov.Type, shape: list[int]) -> ov.Tensor:
        """Allocates memory on the device."""
        if self.device == "cpu":
            return ov.Tensor(kind, ov.Shape(shape))
        return self._compiled.get_context().create_tensor(kind, ov.Shape(shape), {})


def _read(core: ov.Core, file: Path) -> ov.Model:
    """Returns a converted model. Raises `UnusableModel` if its files are damaged."""
    try:
        return core.read_model(file)
    except RuntimeError as error:
        raise UnusableModel(
            f"the converted model in {file.parent} is damaged ({' '.join(str(error).split())[-200:]}): "
            + (remedy_for(file.parent) or "convert it again"),
            model=file.parent,
        ) from error


def find_device(name: str, core: ov.Core | None = None) -> str:
    """Returns OpenVINO's name of a device. Raises `UnusableModel`."""
    found = "CPU" if name == "auto" else name.upper()
    if found.startswith("NPU"):
        raise UnusableModel("OpenVINO does not support paged attention on NPUs: use --device cpu or gpu")
    available = (core or ov.Core()).available_devices
    if found not in available:
        raise UnusableModel(
            f"OpenVINO does not find the device {name}, only {', '.join(available).lower()}: use one of "
            f"these, or install the driver of {name}"
        )
    return found


def refuses(dtype: str, threads: int | None) -> bool:
    """Returns whether this engine refuses a data type on CPUs: OpenVINO 2026.4 crashes in bfloat16 with one thread
    (division by zero), and small models return NaN in float16.
    """
    return dtype == "float16" or (dtype == "bfloat16" and _alone(threads))


def _alone(threads: int | None) -> bool:
    return min(threads or core_count(), core_count()) == 1


def _options(
    core: ov.Core, device: str, dtype: str, weights: str, threads: int | None
) -> tuple[str, dict[str, str | int | bool]]:
    """Returns the data type to compute in, and OpenVINO's settings for it."""
    if device != "CPU":
        precision = _DTYPES.get(dtype, "f16")
        return precision, {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": "f16"}
    # Pinned threads of two model servers would compete for the same cores.
    options: dict[str, str | int | bool] = {"PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
    if threads is not None:
        options["INFERENCE_NUM_THREADS"] = threads
    fast = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if refuses(dtype, threads):
        raise UnusableModel(
            "on CPUs, OpenVINO does not compute reliably in float16, nor in bfloat16 with one thread: use --dtype "
            "float32 or auto, or bfloat16 with --threads 2"
        )
    if dtype != "auto":
        # No 8-bit activations, because the user has chosen the precision.
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        precision = _DTYPES[dtype]
    elif weights == "full" and fast and not _alone(threads):
        precision = "bf16"
    else:
        precision = "f32"
    kept = "f16" if dtype == "auto" and precision == "f32" else precision
    return precision, options | {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": kept}
