"""Estimates what passes cost and how often candidates are accepted, and plans each pass from that."""
