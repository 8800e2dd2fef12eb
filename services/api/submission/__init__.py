"""What a submission has to satisfy, and what it takes over from an earlier one."""
