"""The command `draftbridge`: its subcommands, the demo, and the processes that it starts."""
