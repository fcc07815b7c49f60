"""Runs the `draftbridge` command, also as `python -m services.cli`."""

import signal


def main() -> None:
    """Imports the command and runs it. Ctrl-C ends the process without a traceback while it is being imported."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise it is ignored, as in a background job of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from services.cli.app import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
