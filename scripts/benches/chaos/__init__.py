"""A real swarm under a storm of faults: scripts/chaos."""
