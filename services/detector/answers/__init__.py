"""What the detector answers to one input: events to append, and questions to ask."""
