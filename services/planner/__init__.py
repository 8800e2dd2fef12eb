"""The planner: answers each trigger with one plan event (docs/planner.md)."""
