"""Tells how to install what the basic installation lacks."""


def install_extra(name: str) -> str:
    """Returns the command, for messages. With `-e`, the code of the checkout stays in use."""
    return f"pip install -e '.[{name}]' in the checkout"
