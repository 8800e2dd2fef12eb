"""Settings: environment variables, their defaults and reasons, and what is said of wrong ones."""
