"""A model's weights and KV cache: ids in, logits out. Knows nothing of gRPC, text or sampling."""
