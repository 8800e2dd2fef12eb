"""Joining a generation: process groups, the agreement of its members, the state each takes."""
