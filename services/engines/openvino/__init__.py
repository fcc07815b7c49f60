"""The `openvino` engine: converted transformers models on Intel devices."""
