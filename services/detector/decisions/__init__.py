"""What the detector decides on one input: events to append, and questions to ask."""
