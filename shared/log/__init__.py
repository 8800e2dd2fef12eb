"""The event log: one append-only SQL table, relayed to a JetStream stream.

``schema`` has the table and opens databases; ``log`` appends and reads; ``relay`` publishes rows to JetStream;
``journal`` combines both and lets a service follow the log; ``own_events`` has the events that a service has folded
before their delivery.
"""
