"""Notices to a webhook, and how they are sent."""
