"""Runs what model servers send, tokenizers and chat templates, in processes with limits of memory and time."""
