"""Which peers belong to a stage's group, and what these peers report to each other about their round."""
