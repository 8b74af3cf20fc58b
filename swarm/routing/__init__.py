"""Which peer of a stage gets the next microbatch."""
