"""The `draftbridge` command: its subcommands, the demo, and the processes that it starts."""
