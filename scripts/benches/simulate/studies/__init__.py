"""What scripts/simulate runs: each module is one study."""
