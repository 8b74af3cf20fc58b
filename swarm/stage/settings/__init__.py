"""The two settings: synchronous, where a round is one optimizer step as in one process, and DiLoCo."""
