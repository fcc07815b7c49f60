"""Models on disk: found by name or path, downloaded, checked, converted."""
