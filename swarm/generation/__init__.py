"""Text from a model: how tokens are chosen, and what computes them."""
