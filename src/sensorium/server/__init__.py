"""The HTTP server: its processes, its routes, its metrics."""
