"""Ways to choose the peer for a microbatch: what the study `routing` compares."""
