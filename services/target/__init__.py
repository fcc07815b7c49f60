"""The target service: decodes, and takes candidates along."""
