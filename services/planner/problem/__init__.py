"""The planning problem of a moment, and from its solution the best change for the whole cluster."""
