"""The events of the log, what they are made of, and how older ones are read."""
