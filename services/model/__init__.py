"""Model servers: one model served as a draft, as a target, or as both."""
