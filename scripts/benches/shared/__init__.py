"""Code that several benches use to measure. None of it is run by itself."""
