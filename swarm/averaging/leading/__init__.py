"""One peer of a stage leads: it begins attempts, sees them through, and says what is decided."""
