"""What all services speak: events, log, bus, task and cluster models, severities, cost, settings."""
