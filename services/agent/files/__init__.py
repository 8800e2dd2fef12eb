"""Files of tasks on a node: outputs, inputs, secrets, in-memory copies."""
