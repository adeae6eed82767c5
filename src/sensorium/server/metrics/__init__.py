"""The metrics of a server: each process writes its own, and any of them reads all."""
