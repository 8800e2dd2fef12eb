"""The documents of the projections: one for each task, incident, plan and node."""
