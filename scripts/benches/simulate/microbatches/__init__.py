"""A simulated swarm through which every microbatch goes its way: for the study `routing`."""
