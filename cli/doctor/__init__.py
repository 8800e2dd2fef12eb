"""``unicron doctor``: what is measured of a node, and what it means."""
