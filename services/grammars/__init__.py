"""Compiles grammars with `llguidance` for a model's tokens or for bytes, and follows texts through them."""
