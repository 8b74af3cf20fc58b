"""swarm-status, and the figures of peers and trainers that it and the dashboard show."""
