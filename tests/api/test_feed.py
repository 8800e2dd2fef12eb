"""The feed: who waits for an event waits for its fold, and for nothing that follows."""

from __future__ import annotations

WAIT_S = 20.0
"""Far above what an append, a fold and a turn of a thread take."""
