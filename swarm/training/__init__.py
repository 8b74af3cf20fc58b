"""What all parts of training speak of: microbatches, rounds, inner steps, optimizers."""
