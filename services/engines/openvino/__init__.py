"""The `openvino` engine: converted models on Intel devices."""
