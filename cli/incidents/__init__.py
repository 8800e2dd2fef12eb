"""Verbs about incidents, their evidence and their costs."""
