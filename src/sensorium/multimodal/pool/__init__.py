"""A pool of worker processes that decode and process media items."""
