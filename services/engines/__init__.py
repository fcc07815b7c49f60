"""Engines own a model's weights and KV cache: token ids in, logits out. They know neither gRPC nor text."""
