"""Costs: every worker-second charged once, and reported. Pure."""
