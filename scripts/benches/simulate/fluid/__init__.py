"""A simulated swarm without microbatches, and the rules by which its peers move: for the study `rebalancing`."""
