"""Verbs about the log: events, replay and what-if, archives and backups, exports."""
