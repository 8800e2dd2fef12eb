"""A log of a cluster as it was measured, simulated as it was, and simulated with changes."""
