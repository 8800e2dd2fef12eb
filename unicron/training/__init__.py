"""The training of a task in this process: generations, steps, what of them is done, and how it ends."""
