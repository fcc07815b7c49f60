"""Adapters that give engines with their own loop candidates from a bridge; they import no engine themselves."""
