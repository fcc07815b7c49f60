"""DraftService: proposes tokens ahead of the target."""
