"""The `openvino` engine's entry in the registry, and the conversion of models for it."""

import math
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from bridge.errors import UnusableModel
from services.child import bound_command, environment_before
from services.engines.spec import Dtype, EngineOptions, EngineSpec, Weights
from services.extras import install_extra
from services.store.cache import Report, cache_directory, check_space, fingerprint, making, settle, shortened
from services.store.resolve import default_name, resolve

if TYPE_CHECKING:  # it loads numpy, which few commands need
    from services.engines.engine import Engine

# With their scales, at most: with int4, embeddings and the last layer are in 8 bits.
_WEIGHT_BYTES = {"full": 4.0, "int8": 1.1, "int4": 1.1}
# Version of the converted files. Files of other versions are not used.
_FORMAT = 2
# The status of a process that the system has killed.
_KILLED = -9


def convert(directory: Path, name: str, weights: str, report: Report = lambda text: None) -> Path:
    """Returns the `model.xml` of a transformers directory, with weights "full", "int8" or "int4".

    Converts once, in a child process, and keeps the result in the cache. Raises `UnusableModel`, `CacheUnusable` or
    `NoSpace`.
    """
    final = cache_directory() / f"{shortened(name)}-{fingerprint(directory)}-openvino{_FORMAT}-{weights}"
    converted_file = final / "model.xml"
    if not converted_file.is_file():
        with making(final) as scratch:
            if converted_file.is_file():  # another process has converted it meanwhile
                return converted_file
            report(f"converting {name} for OpenVINO, weights {weights} (once)")
            check_space(scratch, "the converted model", round(_WEIGHT_BYTES[weights] * _weight_count(directory)))
            converted = scratch / "converted"
            program = bound_command("services.engines.openvino.export", str(directory), str(converted), weights)
            done = subprocess.run(
                program,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env=environment_before(),
            )
            if done.returncode:
                check_space(scratch, "the converted model")  # others may have filled the disk meanwhile
                reason = done.stderr.strip().splitlines()[-1:] or ["the process has ended"]
                if done.returncode == _KILLED:
                    reason = ["the process was killed, probably for lack of memory"]
                raise UnusableModel(
                    f"{name} could not be converted for OpenVINO ({reason[0][:500]}): use --engine torch",
                    model=directory,
                )
            settle(converted, final)
    return converted_file


def _weight_count(directory: Path) -> int:
    """Returns the number of weights in the safetensors files of a directory; 0 if that cannot be found out."""
    try:
        # Not for torch, which would be loaded: its OpenMP binds the thread that OpenVINO's threads start from.
        files: list[Any] = [safe_open(path, "np") for path in directory.glob("*.safetensors")]
    except (SafetensorError, OSError):  # the conversion reports damaged files
        return 0
    return sum(int(math.prod(file.get_slice(name).get_shape())) for file in files for name in file.keys())


def _prepare(model: str, options: EngineOptions, report: Report) -> Path:
    # int8 weights were the fastest on Intel CPUs, and cost almost no quality.
    chosen = Weights.INT8 if options.weights is Weights.AUTO else options.weights
    return convert(resolve(model, report), default_name(model), chosen.value, report)


def _open(path: Path, options: EngineOptions) -> "Engine":
    from services.engines.openvino.engine import OpenVinoEngine  # the library may not be installed

    return OpenVinoEngine(
        path,
        device=options.device,
        dtype=options.dtype.value,
        threads=options.threads,
        slot_count=options.slot_count,
        cache_byte_limit=options.cache_byte_limit,
    )


def _passed_over(model: str, options: EngineOptions) -> str:
    if options.compile or not options.on_cpu:
        return "torch is preferred for --compile and for devices other than the CPU"
    try:
        from services.engines.openvino.engine import refuses
    except UnusableModel as error:
        return str(error)
    return "it cannot compute in this data type on CPUs" if refuses(options.dtype.value, options.threads) else ""


def _check_device(device: str) -> None:
    from services.engines.openvino.engine import find_device

    find_device(device)


OPENVINO = EngineSpec(
    name="openvino",
    runs="Hugging Face transformers models that can be exported; they are converted once",
    devices="Intel CPU, Intel GPU",
    prepare=_prepare,
    open=_open,
    dtypes=(Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16),
    weights=(Weights.FULL, Weights.INT8, Weights.INT4),
    modules=("openvino", "nncf"),
    install=install_extra("openvino"),
    reason_to_skip=_passed_over,
    check_device=_check_device,
    auto_weights=Weights.FULL,
)
