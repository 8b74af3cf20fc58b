"""The sides that benches measure and compare: processes that they start, stages that peers load, and arithmetic."""
