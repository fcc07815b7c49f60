"""Tests with real processes, real gRPC and real models."""
