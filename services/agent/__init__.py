"""The node agent: starts and supervises the rank processes of one node, and carries out commands on it."""
