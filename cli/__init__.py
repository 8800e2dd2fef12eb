"""The ``unicron`` command: one module for each verb. Verbs that act on a cluster use the REST API only."""
