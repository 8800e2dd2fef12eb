"""Whether a node is as fast as its hardware should be: published rates, and the judgement of measured ones. Pure."""
