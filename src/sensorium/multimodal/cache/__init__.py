"""Caches of processed items: on the frontend's side, on the core's, and between them."""
