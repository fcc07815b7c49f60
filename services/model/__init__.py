"""The model server: serves one model as a draft, as a target, or as both."""
