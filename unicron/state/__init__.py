"""The training state of one rank, and its transfer between ranks and layouts."""
