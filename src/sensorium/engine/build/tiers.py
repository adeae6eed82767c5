"""Builds the tiers behind the caches of media, which outlive the engine."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from transformers import PretrainedConfig

from sensorium.engine.build.options import LoadingOptions, MediaOptions
from sensorium.models.checkpoint import get_weights_identity
from sensorium.models.families import ADAPTERS
from sensorium.models.loading import resolve_device, resolve_dtype
from sensorium.models.recogniser import is_recogniser
from sensorium.models.streaming import StreamingAdapter
from sensorium.multimodal.tiers.disk import DiskStore
from sensorium.multimodal.tiers.tiers import MediaTiers

# Another version of one of these may make other tensors of a media item.
_PACKAGES = ("sensorium", "torch", "transformers", "torchvision", "pillow", "av", "soundfile")


def build_tiers(
    loading: LoadingOptions, directory: Path, hf_config: PretrainedConfig, options: MediaOptions
) -> MediaTiers | None:
    """Open the stores that the options name, or return None if they name none.

    Encoder outputs are shared by engines with the same weights in the same type, and the same
    versions of libraries. Processed items are shared by those that process and limit them alike.
    Call this before the weights are loaded, because their files may be replaced later. Raises a
    `ModelError` if a store can't be used.
    """
    if options.mm_disk_cache is None:
        return None
    disk = DiskStore(
        Path(options.mm_disk_cache).expanduser(), int(options.mm_disk_cache_gb * 2**30)
    )
    dtype = resolve_dtype(loading.dtype, hf_config, resolve_device(loading.device))
    identity = get_weights_identity(directory)
    return MediaTiers(
        [disk],
        model="\n".join([identity, str(dtype), *_list_versions()]),
        processing="\n".join([*_list_versions(), *_list_limits(options)]),
    )


def _list_limits(options: MediaOptions) -> list[str]:
    """Return all options of media that decide what is made of an item, and what is refused."""
    own = replace(options.media_limits, allowed_domains=frozenset(), allowed_local_path=None)
    parts = (own, options.allow_larger_media, options.mm_processor_kwargs, options.media_io_kwargs)
    return [repr(part) for part in parts]


def _list_versions() -> list[str]:
    return [f"{name} {_get_version(name)}" for name in _PACKAGES]


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def takes_encoded(hf_config: PretrainedConfig) -> bool:
    """Return whether encoder outputs of a model can be kept and used again.

    A recogniser makes its answer of a sound at once, and a streaming model has no whole sound.
    """
    adapter = ADAPTERS.get(hf_config.model_type)
    is_streaming = adapter is not None and issubclass(adapter, StreamingAdapter)
    return not is_streaming and not is_recogniser(hf_config)
