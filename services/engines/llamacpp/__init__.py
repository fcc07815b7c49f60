"""The `llamacpp` engine: GGUF files through llama-cpp-python."""
