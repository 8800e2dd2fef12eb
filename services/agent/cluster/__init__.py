"""The agent as a member of the cluster: admission, heartbeats, signals, probes, self-test."""
