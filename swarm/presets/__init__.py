"""Ready-made configurations, for swarm-peer --preset NAME."""
