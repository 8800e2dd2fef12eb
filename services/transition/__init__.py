"""The transition service: executes plans through the node agents and records the state moved."""
