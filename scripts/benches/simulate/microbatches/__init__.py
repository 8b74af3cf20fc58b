"""A simulated swarm through which every microbatch goes its way: for the studies `routing` and `validate`."""
