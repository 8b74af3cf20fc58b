"""What happens to vectors in averaging: all-reduce, error feedback, results, snapshots. Stands on the wire."""
