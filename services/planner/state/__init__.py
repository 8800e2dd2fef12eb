"""The planner's state: nodes, slow workers and waiting tasks, folded from the log."""
