"""What benches measure and compare: the processes that they start, stages that peers load, and arithmetic."""
