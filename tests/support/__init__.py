"""What tests share: tiny models, tokenizer families, real models, reference loops."""
