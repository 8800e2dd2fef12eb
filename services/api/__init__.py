"""The gateway: projections of the log, REST interface, cost reports."""
