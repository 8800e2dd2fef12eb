"""HTTP for all routes: problems, methods, request metrics, policy."""
