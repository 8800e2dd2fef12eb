"""What the machine of a node is and has: its address, its devices, and what the kernel tells."""
