"""See `layers`."""
