"""TargetService: decodes, and verifies candidates on the way."""
