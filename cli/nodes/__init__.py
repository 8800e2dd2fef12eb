"""Verbs about nodes, their agents, and what they need to join."""
