"""How others reach a process: where it listens, what is announced, and whether that is true."""
