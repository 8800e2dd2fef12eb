"""What crosses services: events and messages, log and bus, views and costs, planning, settings."""
