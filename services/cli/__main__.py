"""Runs the `draftbridge` command, also as `python -m services.cli`, and ends it without a traceback at Ctrl-C."""

import signal
import sys


def main() -> None:
    """Imports the command, during which Ctrl-C ends the process at once, and runs it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise it is ignored, as in a background job of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from services.cli.app import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
