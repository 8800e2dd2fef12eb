"""The Pythons that tasks name, as whoever asks one of them has to know."""

ANSWER_LIMIT_S = 10.0
"""Time in which a Python says what it has: it takes 0.1 s, a second on a busy machine, and several where it lies on a
network file system from which nothing has been read yet."""
