"""What a training run tells about itself: a JSONL file, Weights & Biases if wanted, and a plot of the loss."""
