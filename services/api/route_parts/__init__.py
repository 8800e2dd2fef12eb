"""What several routes share: bodies, parameters, lists, conditions, positions of the log."""
