"""The `habana` engine: optimum-habana's models on Intel Gaudi, in passes of static shapes."""
