"""Generates text with a model: engines that compute the next tokens, and how these are chosen."""
