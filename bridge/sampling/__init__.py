"""Chooses tokens in the model servers: parameters, noise that anyone can recompute, and the sampler."""
