"""What a log says of the cluster as documents, one for each task, incident, plan and node; folded from its events."""
