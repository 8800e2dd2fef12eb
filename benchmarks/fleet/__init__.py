"""A fleet of simulated nodes against the real control plane (``__main__`` has the courses)."""
