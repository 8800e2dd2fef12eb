"""The link of a training process to its node agent: connection, requests and reports, breaking collectives off."""
