"""The Transformers seam: loading, the generic adapter, families. No model is written anew here."""

from sensorium.models.torchvision_shim import ensure_torchvision

ensure_torchvision()  # before anything imports Transformers' processors
