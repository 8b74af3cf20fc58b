"""The programs, in which everything is wired together."""
