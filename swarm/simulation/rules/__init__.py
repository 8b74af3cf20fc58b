"""Rules by which peers choose their stage and move: what the study `rebalancing` compares."""
