"""How a member gets to another round, also where it was left behind: results, snapshots, branches of the run."""
