"""The diloco bench's arms: their table, the process that trains one, its swarm, and the file that keeps its figures."""
