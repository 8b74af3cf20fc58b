"""swarm-doctor, and the checks that swarm-peer makes before it begins."""
