"""Builds the tiers behind the caches of media, which outlive the engine."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import PretrainedConfig

from sensorium.engine.build.options import LoadingOptions, MediaOptions
from sensorium.models.checkpoint import get_weights_identity
from sensorium.models.families import ADAPTERS
from sensorium.models.loading import resolve_device, resolve_dtype
from sensorium.models.recogniser import is_recogniser
from sensorium.models.streaming import StreamingAdapter
from sensorium.multimodal.tiers.disk import DiskStore
from sensorium.multimodal.tiers.tiers import MediaTiers


def build_tiers(
    loading: LoadingOptions, directory: Path, hf_config: PretrainedConfig, options: MediaOptions
) -> MediaTiers | None:
    """Open the stores that the options name, or return None if they name none.

    Encoder outputs are shared by engines with the same weights in the same type, and the same
    version of Transformers. Raises a `ModelError` if a store can't be used.
    """
    if options.mm_disk_cache is None:
        return None
    disk = DiskStore(
        Path(options.mm_disk_cache).expanduser(), int(options.mm_disk_cache_gb * 2**30)
    )
    dtype = resolve_dtype(loading.dtype, hf_config, resolve_device(loading.device))
    identity = get_weights_identity(directory)
    return MediaTiers([disk], model=f"{identity}\n{dtype}\n{transformers.__version__}")


def takes_encoded(hf_config: PretrainedConfig) -> bool:
    """Return whether encoder outputs of a model can be kept and used again.

    A recogniser makes its answer of a sound at once, and a streaming model has no whole sound.
    """
    adapter = ADAPTERS.get(hf_config.model_type)
    is_streaming = adapter is not None and issubclass(adapter, StreamingAdapter)
    return not is_streaming and not is_recogniser(hf_config)
