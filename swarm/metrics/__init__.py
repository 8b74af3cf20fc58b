"""The figures of a training: a JSONL file, a plot of the loss, and reports to Weights & Biases and TensorBoard."""
