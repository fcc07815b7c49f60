"""Finds models by name or path, and downloads, checks and converts them."""
