"""How a token is chosen: parameters, noise that anyone can recompute, and the sampler. Runs beside the models."""
