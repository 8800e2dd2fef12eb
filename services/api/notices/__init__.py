"""Notices to those who are on call: what they say, to whom they go, and how they are sent."""
