"""TargetService, which decodes and verifies candidates."""
