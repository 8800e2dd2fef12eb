"""The bus: one connection to NATS with typed errors, what is sent over it, and as whom."""
