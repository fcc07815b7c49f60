"""The libraries that are rivals; each module imports its library only when it loads a model."""
