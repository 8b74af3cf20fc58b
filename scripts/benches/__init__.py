"""What users measure with, a module for each bench; shared/ is how benches measure, and sides/ what."""
