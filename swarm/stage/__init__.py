"""LOOP 2: the stage peer."""
