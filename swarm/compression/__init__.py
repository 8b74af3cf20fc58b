"""Codecs: vectors as few bytes."""
