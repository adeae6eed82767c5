"""What can't be asked of a model: one small file per family, by its `model_type`."""

from sensorium.models.adapter import ModelAdapter
from sensorium.models.families.gemma3 import Gemma3Adapter
from sensorium.models.families.gemma4 import Gemma4Adapter
from sensorium.models.families.qwen2_5_omni import Qwen25OmniAdapter
from sensorium.models.families.qwen2_audio import Qwen2AudioAdapter
from sensorium.models.families.qwen3_vl import Qwen3VLAdapter

ADAPTERS: dict[str, type[ModelAdapter]] = {
    "gemma3": Gemma3Adapter,
    "gemma4": Gemma4Adapter,
    "qwen2_5_omni_thinker": Qwen25OmniAdapter,
    "qwen2_audio": Qwen2AudioAdapter,
    "qwen3_vl": Qwen3VLAdapter,
}
