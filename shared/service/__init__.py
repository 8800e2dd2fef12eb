"""The frame of a service process: start, health, metrics, state snapshots, HTTP."""
