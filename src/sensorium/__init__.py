"""Sensorium."""
