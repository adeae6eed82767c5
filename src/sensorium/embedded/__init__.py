"""Provides the model that comes with the package, and samples to demonstrate it."""

EMBEDDED_MODEL = "sensorium-mini"  # its name in every option that takes a model
