"""One peer of a stage leads: it begins attempts, carries them out, and announces what is decided."""
