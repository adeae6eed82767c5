"""The metrics of a server: each process writes its own, and can read those of all."""
