"""Makes torchvision importable before a test module imports Transformers' model classes."""

import sensorium.models  # noqa: F401
