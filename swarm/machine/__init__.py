"""What the machine provides: time, disk and memory."""
