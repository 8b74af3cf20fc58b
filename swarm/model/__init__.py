"""The transformer, and the stages that it is cut into."""
