"""The diloco bench's arms: the table of them, the process that trains one, its swarm, and what is kept of it."""
