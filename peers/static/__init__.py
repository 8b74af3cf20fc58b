"""swarm-static: trains a run's model on a fixed set of workers, without a swarm."""
