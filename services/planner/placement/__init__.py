"""What a plan does to tasks: their workers, the stages of a change, and what it costs."""
