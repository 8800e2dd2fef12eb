"""The event log: one append-only SQL table, relayed to a JetStream stream.

``schema`` has the table and opens databases; ``log`` appends and reads; ``writing`` has the transaction that appends,
``group`` brings together the appends that share one; ``relay`` publishes rows to JetStream; ``journal`` combines log
and relay and lets a service follow the log; ``own_events`` has the events that a service has folded before their
delivery.
"""
