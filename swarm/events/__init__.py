"""The events that a process records, and the file to which it writes them."""
