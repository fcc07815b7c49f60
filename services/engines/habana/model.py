"""Loads optimum-habana's models as its text-generation example does: one device or DeepSpeed, bfloat16 or FP8."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama import modeling_llama as llama

from bridge.errors import UnusableModel
from services.engines.habana.launch import rank_count
from services.engines.selftest import SelfTest
from services.engines.spec import GaudiOptions
from services.engines.torch.model import load_model

# Model families whose sums over devices optimum-habana itself arranges, see its text-generation example. Falcon and
# Starcoder2, which are there too, do not run with fixed slots.
_SCOPED_SUMS = ("llama", "qwen2", "gemma")


def prepare_process(gaudi: GaudiOptions) -> None:
    """Sets what the libraries read when they are first used, and replaces transformers' models by optimum-habana's."""
    os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
    os.environ.setdefault("EXPERIMENTAL_WEIGHT_SHARING", "FALSE")
    if rank_count() > 1:
        os.environ.setdefault("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true")
    if gaudi.quant_config:
        # optimum-habana's attention reads this variable too.
        os.environ["QUANT_CONFIG"] = str(gaudi.quant_config)
    _adapt()
    if gaudi.quant_config:
        import habana_frameworks.torch.core as htcore

        htcore.hpu_set_env()


def check_lazy_mode(gaudi: GaudiOptions) -> None:
    """Raises `UnusableModel` if Gaudi's library runs in eager mode, in which HPU graphs do not exist.

    The library reads the variable when torch imports it, so setting the variable later has no effect.
    """
    default = "0" if "habana_frameworks.torch" in sys.modules else "1"
    if gaudi.use_hpu_graphs and os.environ.get("PT_HPU_LAZY_MODE", default) == "0":
        raise UnusableModel(
            "HPU graphs need lazy mode: export PT_HPU_LAZY_MODE=1 before the start, or use --no-use-hpu-graphs"
        )


def self_test(source: Path, dtype: torch.dtype, trusted: bool) -> SelfTest | None:
    """Computes the self-test of a model with transformers' own classes, on the CPU.

    Must be called before `prepare_process`, which replaces those classes. Returns None if they have been replaced.
    """
    return None if _is_adapted() else SelfTest.of(load_model(source, dtype, trusted).eval())


def _is_adapted() -> bool:
    return bool(llama.LlamaForCausalLM.__name__.startswith("Gaudi"))


def _adapt() -> None:
    from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi
    from optimum.habana.transformers.models.gemma.modeling_gemma import GaudiGemmaDecoderLayer
    from optimum.habana.transformers.models.llama.modeling_llama import GaudiLlamaDecoderLayer

    adapt_transformers_to_gaudi()
    # The call replaces classes in the modules of models only. Their packages keep those that the self-test has loaded.
    for package in MODEL_FOR_CAUSAL_LM_MAPPING._modules.values():
        for name in [one for one in vars(package) if one.endswith("ForCausalLM")]:
            delattr(package, name)
    # optimum-habana 1.21 normalizes before it adds the residual, which gives other logits. Gemma adds first, as Llama.
    GaudiGemmaDecoderLayer.post_attn_pre_mlp = GaudiLlamaDecoderLayer.post_attn_pre_mlp


def load_sharded(source: Path, config: Any, dtype: torch.dtype, trusted: bool) -> Any:
    """Loads this process's part of a model that DeepSpeed divides among processes (tensor parallelism).

    The part is on the process's device afterwards. Raises `UnusableModel` without DeepSpeed or safetensors files.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UnusableModel(
            "several Gaudis need Intel's DeepSpeed: install the release of this Gaudi software in this environment, "
            "see docs/guides/gaudi.md"
        ) from error
    from optimum.habana.checkpoint_utils import get_ds_injection_policy, model_on_meta

    deepspeed.init_distributed(dist_backend="hccl")
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "tensor_parallel": {"tp_size": rank_count()},
        # The engine wraps its whole pass, not only the model.
        "enable_cuda_graph": False,
        "injection_policy": get_ds_injection_policy(config),
    }
    with NamedTemporaryFile(suffix=".json", mode="w+") as checkpoints:
        if model_on_meta(config):
            with deepspeed.OnDevice(dtype=dtype, device="meta"):
                model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, attn_implementation="eager")
            _write_checkpoints(source, checkpoints)
            arguments["checkpoint"] = checkpoints.name
        else:
            with deepspeed.OnDevice(dtype=dtype, device="cpu"):
                model = load_model(source, dtype, trusted)
        model = deepspeed.init_inference(model.eval(), **arguments).module
    if config.model_type in _SCOPED_SUMS:
        _scope_sums(model)
    return model


def _write_checkpoints(source: Path, file: IO[str]) -> None:
    """Lists the files with weights for DeepSpeed.

    optimum-habana's own function prefers `pytorch_model*.bin`, and reading such files can run code in them.
    """
    weights = sorted(map(str, source.glob("model*.safetensors")))
    if not weights:
        raise UnusableModel(
            f"the model in {source} has no model*.safetensors, which several Gaudis need: save it again with "
            "save_pretrained(safe_serialization=True)",
            model=source,
        )
    json.dump({"type": "ds_model", "checkpoints": weights, "version": 1.0}, file)
    file.flush()


def _scope_sums(model: torch.nn.Module) -> None:
    from deepspeed.module_inject.layers import LinearAllreduce
    from optimum.habana.transformers.models.modeling_all_models import ScopedLinearAllReduce

    for name, module in model.named_children():
        if type(module) is LinearAllreduce:
            setattr(model, name, ScopedLinearAllReduce(mod=module))
        else:
            _scope_sums(module)


def computes_fp8(quant_config: Path | None) -> bool:
    """Returns whether a file of `--quant-config` asks for FP8. While it asks for measurements, nothing is rounded."""
    return quant_config is not None and _read(quant_config).get("mode") != "MEASURE"


def _read(quant_config: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(quant_config.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UnusableModel(
            f"--quant-config {quant_config} cannot be read ({error}): name a file of optimum-habana's "
            "examples/text-generation/quantization_config"
        ) from error


def _check_statistics_folder(quant_config: Path) -> None:
    """Raises `UnusableModel` now rather than after hours of measuring."""
    folder = Path(_read(quant_config).get("dump_stats_path", "")).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UnusableModel(
            f"measurements cannot be written to {folder.absolute()} ({error.strerror}): change dump_stats_path in "
            f"{quant_config}, or start in a writable folder"
        ) from error


def quantize(model: Any, quant_config: Path) -> tuple[Any, Callable[[], None] | None]:
    """Measures or quantizes a model in FP8 with Intel Neural Compressor, as the file's `mode` requires.

    Returns the model and, if it measures, a function that writes this process's measurements before the process ends.
    Raises `UnusableModel` if the library is not installed, or if the measurements could not be written.
    """
    try:
        from neural_compressor.torch.quantization import FP8Config, convert, finalize_calibration, prepare
    except ImportError as error:
        raise UnusableModel(
            "--quant-config needs Intel Neural Compressor: pip install neural-compressor-pt in this environment"
        ) from error
    config = FP8Config.from_json_file(str(quant_config))
    if config.measure:
        _check_statistics_folder(quant_config)
        model = prepare(model, config)
        return model, partial(finalize_calibration, model)
    return convert(model, config) if config.quantize else model, None


def mark_constants(model: Any) -> None:
    """Tells the compiler of graphs that the scales of FP8 do not change. Called when the model is on its device."""
    import habana_frameworks.torch.core as htcore

    htcore.hpu_initialize(model, mark_only_scales_as_const=True)


def _is_ignored(config: Any, name: str, wanted: Mapping[str, bool]) -> bool:
    """Returns whether the model's class takes an option, and then ignores it or computes another attention."""
    match name:
        case "attn_softmax_bf16":
            return config.model_type == "gemma2" or "use_flash_attention" in wanted
        case "flash_attention_fast_softmax":
            return bool(config.model_type == "qwen2")
        case "use_flash_attention":  # the fused kernel has neither the soft cap nor another scale
            scaled = getattr(config, "query_pre_attn_scalar", None)
            return bool(getattr(config, "attn_logit_softcapping", None)) or scaled not in (
                None,
                getattr(config, "head_dim", None),
            )
    return False


def model_options(model: Any, gaudi: GaudiOptions) -> dict[str, bool]:
    """Returns the arguments of each forward. Raises `UnusableModel` for an option that the model does not have."""
    known = inspect.signature(model.forward).parameters
    wanted = {
        name: True
        for name in (
            "attn_softmax_bf16", "use_flash_attention", "flash_attention_recompute", "flash_attention_fast_softmax"
        )
        if getattr(gaudi, name)
    }  # fmt: skip
    for name in wanted:
        if name not in known or _is_ignored(model.config, name, wanted):
            raise UnusableModel(
                f"optimum-habana's {model.config.model_type} has no {name} that works as it says: leave out "
                f"--{name.replace('_', '-')}",
                model_type=model.config.model_type,
            )
    missing = {"token_idx", "reuse_cache", "logits_to_keep"} - set(known)
    if missing:
        raise UnusableModel(
            f"optimum-habana's {model.config.model_type} cannot run with fixed slots (it lacks "
            f"{', '.join(sorted(missing))}): choose a Llama, Qwen2, Mistral or Gemma model, or use --engine torch",
            model_type=model.config.model_type,
        )
    return wanted
