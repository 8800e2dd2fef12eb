"""What is wrong now: one cause each, with what to do about it, what it costs, and who takes care of it."""
