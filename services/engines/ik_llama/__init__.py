"""The `ik_llama` engine: GGUF files through the prebuilt library of ik-llama-cpp-python."""
