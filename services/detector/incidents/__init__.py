"""From a fault to its incident: cause, severity, escalation, observations."""
