"""Tests of the algorithm, without processes and mostly without models."""
