"""What the REST API answers and takes: the stable contract, as models."""
