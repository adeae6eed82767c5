"""Holds the code that single families of models need, in one small file for each family.

The adapter of a family is found by its `model_type`. Models of other types run through the generic
adapter, if they pass a trial.
"""

from __future__ import annotations

from sensorium.models.adapter import ModelAdapter
from sensorium.models.families.gemma3 import Gemma3Adapter
from sensorium.models.families.gemma4 import Gemma4Adapter
from sensorium.models.families.qwen2_5_omni import Qwen25OmniAdapter
from sensorium.models.families.qwen2_audio import Qwen2AudioAdapter
from sensorium.models.families.qwen3_vl import Qwen3VLAdapter
from sensorium.types.families import FAMILIES

OWN_ADAPTERS: dict[str, type[ModelAdapter]] = {
    "gemma3": Gemma3Adapter,
    "gemma4": Gemma4Adapter,
    "qwen2_5_omni_thinker": Qwen25OmniAdapter,
    "qwen2_audio": Qwen2AudioAdapter,
    "qwen3_vl": Qwen3VLAdapter,
    "qwen3_vl_moe": Qwen3VLAdapter,
}
# model_type -> adapter, for every known family.
ADAPTERS: dict[str, type[ModelAdapter]] = {
    family.model_type: OWN_ADAPTERS.get(family.model_type, ModelAdapter) for family in FAMILIES
}
