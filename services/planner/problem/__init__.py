"""The planning problem of a moment, and its answers for the whole cluster."""
