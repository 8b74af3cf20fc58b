"""How benches measure: what several of them use, and nobody runs."""
