"""Measures what forwards cost, how often candidates are right, and both for a draft model."""
