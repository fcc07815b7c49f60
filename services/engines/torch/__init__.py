"""The `torch` engine: any transformers model on CPU or CUDA."""
