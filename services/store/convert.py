"""Converts a GGUF file to a transformers directory: `python -m services.store.convert FILE DIRECTORY [DTYPE]`.

DTYPE is the data type of the stored weights. float32 represents every value of the quantized file exactly, bfloat16 is
what an engine that computes in bfloat16 makes of that. Without it, or if it is empty, only everything else is written:
tokenizer, chat template, configuration.
"""

import functools
import signal
import sys
from pathlib import Path
from typing import Any

from services.child import quiet_libraries
from services.store.gguf import CUT_STATUS, is_cut, reader

# The token that ends a document in pretraining, and so ends any text outside a chat.
_END_OF_DOCUMENT = "<|endoftext|>"


def convert(source: Path, destination: Path, dtype: str = "") -> None:
    """Writes the tokenizer, the configuration and perhaps the weights of a GGUF file to the directory `destination`."""
    import gguf  # these take seconds, in which Ctrl-C would print a traceback if the main program imported them
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # Transformers reads a file's metadata anew for each part, and a reader takes seconds for a large vocabulary.
    vars(gguf)["GGUFReader"] = functools.cache(reader())
    safe: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}  # nothing beside the file may run
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **safe)
    if dtype:
        options = safe | {dtype_keyword(): getattr(torch, dtype)}
        model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
        # The saved weights are not quantized.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        generation = model.generation_config
    else:
        model = AutoConfig.from_pretrained(source.parent, **safe)
        generation = GenerationConfig.from_model_config(model)
    generation.eos_token_id = ends(tokenizer) or generation.eos_token_id
    model.save_pretrained(destination)
    generation.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    for file in destination.glob("*.safetensors"):  # which only their owner could read
        file.chmod((destination / "config.json").stat().st_mode)


def dtype_keyword() -> str:
    """Returns the name of the argument by which `from_pretrained` takes the data type of the weights."""
    import transformers  # takes seconds, see above

    old = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 56)
    return "torch_dtype" if old else "dtype"


def ends(tokenizer: Any) -> list[int]:
    """Returns the ids that end a text. A GGUF file has one; for Qwen, the second one is its padding token."""
    also = tokenizer.pad_token_id if tokenizer.pad_token == _END_OF_DOCUMENT else None
    return list(dict.fromkeys(id_ for id_ in (tokenizer.eos_token_id, also) if id_ is not None))


if __name__ == "__main__":
    quiet_libraries()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent, which Ctrl-C interrupts too, reports it
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    # For damaged files and unknown architectures, the libraries raise errors of many kinds.
    except Exception as error:
        sys.exit(CUT_STATUS if is_cut(Path(sys.argv[1])) else f"conversion failed: {type(error).__name__}: {error}")
