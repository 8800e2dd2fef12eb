"""Verbs about tasks: submitted, followed, changed, ended, and what they left."""
