"""Engines run a model's weights and own its KV cache: ids in, logits out. They know neither gRPC nor text."""
