"""Tests of engines against transformers, one contract for all."""
