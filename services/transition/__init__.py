"""Executes plans over the node agents and reports what moved."""
