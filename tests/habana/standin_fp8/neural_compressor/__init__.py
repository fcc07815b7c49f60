"""Stands in for Intel Neural Compressor."""
