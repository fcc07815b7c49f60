"""`python -m services.cli`: the command `draftbridge`."""

from services.cli.app import main

if __name__ == "__main__":
    main()
