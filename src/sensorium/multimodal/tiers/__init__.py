"""Tiers: caches of processed media and encoder outputs on disk and in Redis."""
