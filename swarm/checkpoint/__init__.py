"""A stage's state on disk."""
