"""`python -m services.store.convert FILE.gguf DIRECTORY`: a GGUF file as a transformers directory.

Weights are stored in float32, which holds every value of the quantized file exactly.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# A token that ends a document in pretraining, and with it whatever a model writes outside of a chat.
_END_OF_DOCUMENT = "<|endoftext|>"


def convert(source: Path, destination: Path) -> None:
    """Writes model and tokenizer of `source` to `destination`."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What is saved is no longer quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = ends(tokenizer) or model.generation_config.eos_token_id
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def ends(tokenizer: Any) -> list[int]:
    """Ids that end a text. A GGUF file names one; Qwen's own settings have a second, which the file calls padding."""
    also = tokenizer.pad_token_id if tokenizer.pad_token == _END_OF_DOCUMENT else None
    return list(dict.fromkeys(id_ for id_ in (tokenizer.eos_token_id, also) if id_ is not None))


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (KeyError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        sys.exit(f"conversion failed: {type(error).__name__}: {error}")
