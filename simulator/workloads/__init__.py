"""What is simulated: clusters, tasks, and traces of what happens to them."""
