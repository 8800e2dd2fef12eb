"""The stack as child processes of a command: ``up``, ``control``, and what the demo uses of them."""
