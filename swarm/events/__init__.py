"""What a process puts on record, and the file that it goes to."""
