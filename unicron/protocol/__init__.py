"""What a training process and its node agent say to each other: messages and environment variables."""
