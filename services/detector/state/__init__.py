"""What the detector knows: the fold of the log, and beside it the telemetry that stays out of the log."""
