"""LOOP 1: the trainer."""
