"""The swarm on virtual time, and beside a real one: scripts/simulate."""
