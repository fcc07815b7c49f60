"""The commands of child processes that run Python."""

import sys


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in this interpreter.

    It does not look for modules in the current directory, which may be a model's: its files must not run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
