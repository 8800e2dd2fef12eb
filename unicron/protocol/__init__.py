"""What a training process and its node agent say to each other: messages, environment variables, their versions."""
