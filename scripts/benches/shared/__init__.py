"""How benches measure: what several of them use. None of it is run by itself."""
