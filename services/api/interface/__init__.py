"""Answers of the interface: the stable contract of the REST API."""
