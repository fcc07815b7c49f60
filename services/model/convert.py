"""`python -m services.model.convert FILE.gguf DIRECTORY`: a GGUF file as a transformers directory.

Weights are stored in float32, which holds every value of the quantized file exactly.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, destination: Path) -> None:
    """Writes model and tokenizer of `source` to `destination`."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What is saved is no longer quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (KeyError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        sys.exit(f"conversion failed: {type(error).__name__}: {error}")
