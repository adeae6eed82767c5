"""What can't be asked of a model: one small file per family, by its `model_type`."""

from sensorium.models.adapter import ModelAdapter
from sensorium.models.families.gemma3 import Gemma3Adapter

ADAPTERS: dict[str, type[ModelAdapter]] = {"gemma3": Gemma3Adapter}
