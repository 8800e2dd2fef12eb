"""The training process: how it is forked, its output and sockets, and faults that are injected into it."""
