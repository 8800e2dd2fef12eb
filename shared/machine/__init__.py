"""The machine and its processes: limits, parents, privacy, files that are there whole or not at all."""
