"""The planner: answers each trigger with one plan event (DESIGN sections 2-3 and 6)."""
