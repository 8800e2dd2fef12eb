"""What users ask of tasks, nodes and incidents: judged, and then appended to the log."""
