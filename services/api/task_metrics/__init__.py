"""What the scripts of tasks log (``run.log``): read from the nodes, merged, kept beside the log."""
