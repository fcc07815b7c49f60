"""Converts a GGUF file to a transformers directory: `python -m services.store.convert FILE.gguf DIRECTORY`.

Weights are stored in float32, which represents every value of the quantized file exactly.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# The token that ends a document in pretraining, and so ends any text outside a chat.
_END_OF_DOCUMENT = "<|endoftext|>"


def convert(source: Path, destination: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file to the directory `destination`."""
    safe = {"gguf_file": source.name, "trust_remote_code": False}  # nothing beside the file may run
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **safe)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **safe)
    # The saved weights are not quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = ends(tokenizer) or model.generation_config.eos_token_id
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def ends(tokenizer: Any) -> list[int]:
    """Returns the ids that end a text. A GGUF file has one; for Qwen, the second one is its padding token."""
    also = tokenizer.pad_token_id if tokenizer.pad_token == _END_OF_DOCUMENT else None
    return list(dict.fromkeys(id_ for id_ in (tokenizer.eos_token_id, also) if id_ is not None))


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (KeyError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        sys.exit(f"conversion failed: {type(error).__name__}: {error}")
