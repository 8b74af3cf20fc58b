"""What benches measure, and what they compare it with: the processes they start, stages that peers load, arithmetic."""
