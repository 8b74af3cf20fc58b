"""Proves from event logs that every microbatch counted as it should."""
