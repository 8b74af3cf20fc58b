"""Rules by which peers choose their stage and move, which the study `rebalancing` compares."""
