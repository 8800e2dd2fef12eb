"""The detector (cluster monitor): from the signals and heartbeats of node agents to the log's events of errors."""
