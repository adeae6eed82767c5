"""What the server counts and measures: written by each process, read by any of them."""
