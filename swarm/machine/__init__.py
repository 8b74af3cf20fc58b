"""What the machine gives: time, disk, memory."""
