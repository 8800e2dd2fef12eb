"""Messages between agents and services, over core NATS."""
