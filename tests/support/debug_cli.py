"""The command `draftbridge` with every logger at level DEBUG."""

import logging

from services.cli.app import main
from services.discreet import discreet_logging

if __name__ == "__main__":
    discreet_logging(logging.DEBUG)
    main()
