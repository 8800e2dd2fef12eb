"""``unicron demo``: its course, its view, its report."""
