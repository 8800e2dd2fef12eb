"""The ``unicron`` command: one verb a module. Verbs that act on a cluster use the REST API only."""
