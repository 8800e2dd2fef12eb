"""Replay: a log decided again, verified, and asked what if."""
