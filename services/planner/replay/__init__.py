"""Replay: a log decided again, and verified."""
