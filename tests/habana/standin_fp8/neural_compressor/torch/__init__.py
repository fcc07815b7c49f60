"""See `quantization`."""
