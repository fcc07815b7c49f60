"""Stands in for torchvision, which optimum-habana imports for a tokenizer of pictures that no test uses."""

transforms = None
