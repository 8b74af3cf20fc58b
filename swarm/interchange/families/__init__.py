"""How each family of models is configured and names its tensors: a file for each family."""
