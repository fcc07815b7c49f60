"""The command `draftbridge` with the loggers of all libraries at level DEBUG, which `--log-level` leaves at WARNING."""

import logging

from services.cli.app import main

if __name__ == "__main__":
    logging.root.setLevel(logging.DEBUG)
    logging.root.setLevel = lambda level: None  # type: ignore[method-assign]
    main()
