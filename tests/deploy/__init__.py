"""Tests of what `deploy/` and the documentation tell people to run."""
