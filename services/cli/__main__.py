"""Runs the `draftbridge` command, also as `python -m services.cli`, and ends it without a traceback at Ctrl-C."""

import os
import sys

from services.interrupts import importing


def main() -> None:
    """Imports the command, during which Ctrl-C ends the process at once, and runs it."""
    _open_streams()
    try:
        with importing():
            from services.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _open_streams() -> None:
    """Opens the standard streams that the caller has closed, which Python has as None, on the null device.

    Otherwise what is opened next, such as a connection, would get their numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it stays open)


if __name__ == "__main__":
    main()
