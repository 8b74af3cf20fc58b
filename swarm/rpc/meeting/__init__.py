"""Peers that others do not reach, and the meeting points that help them."""
