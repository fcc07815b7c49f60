"""OpenVINO: a model that `openvino_export` wrote, on Intel's CPUs and GPUs.

Keys and values lie in blocks of equally many tokens. Each slot has its own blocks, one behind the other; how many
tokens of them count is said anew with each forward, so rolling back is saying less. Rows of any lengths, in any slots,
share a forward.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bridge.errors import UnusableModel
from bridge.sampling.sampler import Logits
from services.engines.engine import Row, by_row, check, check_copy, core_count, slot_room

try:
    import openvino as ov
except ImportError as error:
    raise UnusableModel(
        "the openvino engine is not installed: pip install 'draftbridge[openvino]', or use --engine torch"
    ) from error

from services.engines.openvino.graph import cache_names, with_attention

# How far the lead of the best logit over the next moved with the width, 1 to 16, on SmolLM2-135M and Gemma-3-270M: at
# most 0.375 in bfloat16. With weights in 8 or 4 bits the activations are rounded to 8 bits, by groups: 0.46 and 1.91.
_TOLERANCES = {"f32": 1e-4, "bf16": 0.75, "f16": 0.1}
_QUANTIZED_TOLERANCES = {"int8": 0.5, "int4": 2.0}
# Tokens filled in, since there was need of them last, that cost about as much as another number of tokens does: for
# full weights and for smaller ones.
_FILLED, _FILLED_QUANTIZED = 48, 16
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVinoEngine:
    """A model in OpenVINO's form, `model.xml` or read already.

    `device`: "auto" (the CPU), "cpu", "gpu", "gpu.1". `dtype`: what is computed in; "auto" takes 8-bit activations
    for weights in 8 or 4 bits, else bfloat16 where the CPU has it. `threads`: CPU threads. `cache_byte_limit`: memory
    for the keys and values of all slots. Raises `UnusableModel`.
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
        target = _device(core, device)
        graph = core.read_model(model) if isinstance(model, Path) else model
        weights = str(graph.get_rt_info(["draftbridge", "weights"]).value)
        limit = int(graph.get_rt_info(["draftbridge", "context_length"]).value)
        self.device, self.slot_count = target.lower(), slot_count
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
        # The last forward: its rows by slot, its tokens, and how many were filled in since one had so many of its own.
        self._rows: dict[int, Row] = {}
        self._size = self._filled = 0
        self._most_filled = _FILLED if weights == "full" else _FILLED_QUANTIZED

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        check(self, rows)
        counts = [len(row.token_ids) for row in rows]
        fillers = self._fillers(rows, sum(counts))
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
                # At least one, because the device does not know what to do with none.
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

    def _fillers(self, rows: Sequence[Row], size: int) -> int:
        """How many tokens to add behind those of a forward's last row, where the next forward drops them.

        OpenVINO prepares every node anew when the number of tokens changes, both ways: 5 to 8 ms on SmolLM2-135M and
        Gemma-3-270M, where a token more takes 0.2 to 0.7. So a forward keeps the number of the one before for a while.
        Only where all rows go on from there: what a sequence gets is not to depend on others that were before it.
        """
        # One with a prompt in it is none to go on from.
        before, self._rows = self._rows, {} if any(row.logits_from for row in rows) else {row.slot: row for row in rows}
        fillers, last = self._size - size, rows[-1]
        goes_on = len(before) == len(rows) and all(
            (old := before.get(row.slot)) and old.keep < row.keep <= old.keep + len(old.token_ids) for row in rows
        )
        fits = last.keep + len(last.token_ids) + fillers <= self.context_length
        if goes_on and fits and 0 < fillers <= self._most_filled - self._filled and self.device == "cpu":
            self._filled += fillers
            return fillers
        self._size, self._filled = size, 0
        return 0

    def _blocks(self, slot: int, length: int) -> NDArray[np.int32]:
        """Where so many tokens of a slot are."""
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
        # Of keys [heads, tokens of a block, size], on GPUs [heads, size, tokens of a block]; of values the former.
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
        """Memory where the device computes."""
        if self.device == "cpu":
            return ov.Tensor(kind, ov.Shape(shape))
        return self._compiled.get_context().create_tensor(kind, ov.Shape(shape), {})


def _device(core: ov.Core, name: str) -> str:
    """OpenVINO's name of a device. Raises `UnusableModel`."""
    found = "CPU" if name == "auto" else name.upper()
    if found.startswith("NPU"):
        raise UnusableModel("OpenVINO has no paged attention for NPUs: use --device cpu or gpu")
    if found not in core.available_devices:
        raise UnusableModel(
            f"OpenVINO finds no device {name} here, only {', '.join(core.available_devices).lower()}: name one of "
            "them, or install its driver"
        )
    return found


def refuses(dtype: str, threads: int | None) -> bool:
    """Whether a CPU cannot compute so: OpenVINO 2026.4 divides by zero in bfloat16 with one thread, which ends the
    process, and its float16 makes NaN of small models.
    """
    return dtype == "float16" or (dtype == "bfloat16" and _alone(threads))


def _alone(threads: int | None) -> bool:
    return min(threads or core_count(), core_count()) == 1


def _options(
    core: ov.Core, device: str, dtype: str, weights: str, threads: int | None
) -> tuple[str, dict[str, str | int | bool]]:
    """What is computed in, and the device's settings for it."""
    if device != "CPU":
        precision = _DTYPES.get(dtype, "f16")
        return precision, {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": "f16"}
    # Threads that are tied to cores would share one with those of another model's server.
    options: dict[str, str | int | bool] = {"PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
    if threads is not None:
        options["INFERENCE_NUM_THREADS"] = threads
    fast = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if refuses(dtype, threads):
        raise UnusableModel(
            "OpenVINO does not compute in float16 on CPUs reliably, nor in bfloat16 with one thread: use --dtype "
            "float32 or auto, or --threads 2"
        )
    if dtype != "auto":
        # As exact as its name says.
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        precision = _DTYPES[dtype]
    elif weights == "full" and fast and not _alone(threads):
        precision = "bf16"
    else:
        precision = "f32"
    kept = "f16" if dtype == "auto" and precision == "f32" else precision
    return precision, options | {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": kept}
