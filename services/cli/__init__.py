"""The `draftbridge` command: its subcommands, the demo, and the processes that it starts."""

import os

# gRPC reads this when it is imported. It would log each failed handshake of each stranger.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
