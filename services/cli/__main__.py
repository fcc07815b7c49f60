"""Makes `python -m services.cli` run the `draftbridge` command."""

from services.cli.app import main

if __name__ == "__main__":
    main()
