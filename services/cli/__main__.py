"""Runs the `draftbridge` command, also as `python -m services.cli`, and ends it without a traceback at Ctrl-C."""

import sys

from services.interrupts import importing


def main() -> None:
    """Imports the command, during which Ctrl-C ends the process at once, and runs it."""
    try:
        with importing():
            from services.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
