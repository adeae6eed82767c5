"""The model that comes with the package, and samples to show it."""

EMBEDDED_MODEL = "sensorium-mini"  # its name, wherever a model is named
