"""Calls between machines: connections, rights, limits and tensors."""
