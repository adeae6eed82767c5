"""Media items: their names, their processing and their places in a prompt."""

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers' processors)
