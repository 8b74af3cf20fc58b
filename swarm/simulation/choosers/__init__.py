"""Ways to choose the peer for a microbatch, which the study `routing` compares."""
