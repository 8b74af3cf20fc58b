"""What all parts of training have in common: microbatches, rounds, inner steps, optimizers."""
