"""Unicron inside a training process: keep this process training through failures.

The only package of the project that enters a user's process. It imports none of the others and, until a trainer is
used, nothing beyond the standard library.
"""
