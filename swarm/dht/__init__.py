"""Signed records in a distributed hash table."""
