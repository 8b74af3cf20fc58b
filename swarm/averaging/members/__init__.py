"""Which peers belong to a stage's group, and what its peers tell each other of their round."""
