"""The processes: model servers, the bridge server, and the command that starts them."""
