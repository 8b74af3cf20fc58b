"""swarm-generate: text from what a run has learnt."""
