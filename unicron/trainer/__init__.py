"""The built-in trainer: a GPT, its data and its task specification."""
