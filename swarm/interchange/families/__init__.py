"""How each family of models is configured and names its tensors, with relatives in one file."""
