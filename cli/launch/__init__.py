"""``unicron run``: what stood behind torchrun, checked, specified as a task, and followed to its end."""
