"""Verbs that show the whole cluster at a glance."""
