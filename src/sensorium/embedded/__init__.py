"""The model that comes with the package, and sample media to demonstrate it."""

EMBEDDED_MODEL = "sensorium-mini"  # its name in every option that takes a model
