"""Runs the models of Transformers: loading, the generic adapter, and code for single families.

No model is reimplemented here.
"""

from sensorium.models.torchvision_shim import ensure_torchvision

ensure_torchvision()  # before anything imports Transformers' processors
