"""Tries llama.cpp's AMX kernels in a process of its own, where a crash does no harm.

    python -m services.engines.llamacpp.probe GGUF

GCC 12 omits the stores that prepare AMX's tile configuration, so that the process crashes in the first forward of more
than one token (llama.cpp issue 20824).
"""

import os
import sys

import llama_cpp


def main() -> None:
    """Exits with status 0 if a forward of several tokens succeeds."""
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(sys.argv[1]), options)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = 256
    context = llama_cpp.llama_init_from_model(model, settings)
    tokens = (llama_cpp.llama_token * 4)(1, 2, 3, 4)
    sys.exit(llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 4)))


if __name__ == "__main__":
    main()
