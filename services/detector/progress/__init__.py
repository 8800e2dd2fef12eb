"""The progress of tasks: what stands still and why, and what is recorded of it."""
