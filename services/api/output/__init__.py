"""What tasks have printed and left on the nodes, found and read."""
