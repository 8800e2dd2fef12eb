"""In-memory copies of the state (snapshots), on the own node and on a peer."""
