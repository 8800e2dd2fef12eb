"""The embedded NATS server, and the key directory, which says who may say what on it."""
