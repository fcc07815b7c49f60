"""DraftService, which proposes tokens ahead of the target."""
