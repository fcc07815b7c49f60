"""Tells how to install what the basic installation lacks."""


def install_extra(name: str) -> str:
    """Returns the command, for messages. It keeps the versions that the tests use, and a checkout's own code."""
    return f"pip install -c constraints.txt -e '.[{name}]' in the checkout"
