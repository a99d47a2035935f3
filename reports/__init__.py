"""Evidence of runs and what a person reads of it."""
