"""Text, as numbered microbatches of tokens."""
