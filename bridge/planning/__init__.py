"""Estimates the speed of every way to continue a text, and plans each pass from that."""
