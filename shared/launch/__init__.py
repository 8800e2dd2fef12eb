"""What a user launches with torchrun: the command line, the script, its arguments, and what of them heals."""
