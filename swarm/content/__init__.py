"""Content that a run's configuration names by digest and peers send to each other: initial weights and the
tokenizer."""
