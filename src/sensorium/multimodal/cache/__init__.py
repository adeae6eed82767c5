"""Caches of processed media items in frontends, in the core, and in memory that they share."""
