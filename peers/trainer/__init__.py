"""swarm-trainer: feeds text into a running swarm and follows its steps."""
