"""The synchronous setting: a round is one optimizer step."""
