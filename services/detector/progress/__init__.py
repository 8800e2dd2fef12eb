"""The progress of tasks: what stands still, whose loss leaps, and what is recorded of it."""
