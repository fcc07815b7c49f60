"""The processes: model servers (draft, target) and the bridge server, and the command that starts them."""
