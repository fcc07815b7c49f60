"""What tests share: tiny models, tokenizer families, real tokenizers, and reference loops."""
