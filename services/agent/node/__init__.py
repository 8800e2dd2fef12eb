"""The state of the node: worker slots, their processes, and the record of both for a successor."""
