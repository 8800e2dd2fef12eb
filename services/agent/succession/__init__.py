"""How one agent follows another while the ranks of the node train on."""
