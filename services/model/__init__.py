"""A model on disk and in a process: finding, converting, describing, serving it."""
