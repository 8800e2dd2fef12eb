"""The planner's state, folded from the log: nodes and pools of hardware, slow workers and deals, waiting tasks."""
