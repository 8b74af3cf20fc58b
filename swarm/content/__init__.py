"""What a run's configuration names by its digest, and peers give each other: initial weights, and the tokenizer."""
