"""swarm-peer: serves one stage of a run."""
