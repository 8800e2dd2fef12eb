"""Measurements of the running system; not part of the tests."""
