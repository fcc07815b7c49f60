"""Runs the tokenizers and chat templates that model servers send in processes with limited memory and time."""
