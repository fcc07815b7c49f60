"""Tests of what the benchmarks measure and conclude."""
