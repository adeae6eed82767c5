"""Builds the media tiers: caches on disk or in a Redis, which outlive the engine."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from transformers import PretrainedConfig

from sensorium.engine.assembly.options import LoadingOptions, MediaOptions
from sensorium.engine.encoding.wire import Identity
from sensorium.models.checkpoint import get_weights_identity
from sensorium.models.loading import resolve_device, resolve_dtype
from sensorium.multimodal.tiers.address import parse_address
from sensorium.multimodal.tiers.disk import DiskStore
from sensorium.multimodal.tiers.interface import Store
from sensorium.multimodal.tiers.tiers import MediaTiers
from sensorium.types.errors import ModelError

_PATIENCE_S = 2.0  # how long a request waits for a store that is not on this machine
# Another version of one of these may make other tensors of a media item.
_PACKAGES = ("sensorium", "torch", "transformers", "torchvision", "pillow", "av", "soundfile")
# Limits that don't change the tensors of an item.
_FREE = frozenset(
    {"deadline_s", "request_deadline_s", "process_deadline_s", "process_wait_s", "max_redirects"}
    | {"allowed_domains", "allowed_local_path", "allow_private_addresses"}
)


def build_tiers(
    loading: LoadingOptions,
    directory: Path,
    hf_config: PretrainedConfig,
    options: MediaOptions,
) -> MediaTiers | None:
    """Open the stores that the options name, or return None if they name none.

    Engines share encoder outputs if they have the same weights in the same dtype and the same
    versions of libraries, and processed items if their limits and processing options are also
    equal. Call this before the weights are loaded, because their files may be replaced later. Raise
    a `ModelError` if a store can't be used.
    """
    stores: list[Store] = []
    if options.mm_disk_cache is not None:
        folder = Path(options.mm_disk_cache).expanduser()
        stores.append(DiskStore(folder, int(options.mm_disk_cache_gb * 2**30)))
    if options.mm_remote_cache is not None:
        stores.append(_open_remote(options.mm_remote_cache, options))
    if not stores:
        return None
    identity = make_identity(loading, directory, hf_config, options)
    return MediaTiers(
        stores,
        model="\n".join([identity.weights, identity.dtype, *identity.versions]),
        processing="\n".join([*identity.versions, *identity.processing]),
        width=get_encoder_width(hf_config),
    )


def make_identity(
    loading: LoadingOptions, directory: Path, hf_config: PretrainedConfig, options: MediaOptions
) -> Identity:
    """Return the identity of encoders with these options: everything that decides their outputs."""
    dtype = resolve_dtype(loading.dtype, hf_config, resolve_device(loading.device))
    return Identity(
        weights=get_weights_identity(directory),
        dtype=str(dtype),
        versions=tuple(_list_versions()),
        processing=tuple(_list_limits(options)),
    )


def _open_remote(url: str, options: MediaOptions) -> Store:
    try:
        from sensorium.multimodal.tiers.redis import RedisStore
    except ModuleNotFoundError as error:
        raise ModelError(
            "mm_remote_cache needs the package redis, which is not installed: "
            "pip install 'sensorium[remote]'"
        ) from error
    address = parse_address(url)
    return RedisStore(address, ttl_s=options.mm_remote_cache_ttl, patience_s=_PATIENCE_S)


def _list_limits(options: MediaOptions) -> list[str]:
    """Return the media options that decide how an item is processed, or whether it is refused."""
    limits = options.media_limits
    decisive = {
        each.name: getattr(limits, each.name) for each in fields(limits) if each.name not in _FREE
    } | {
        "allow_larger_media": options.allow_larger_media,
        "mm_processor_kwargs": options.mm_processor_kwargs,
        "media_io_kwargs": options.media_io_kwargs,
    }
    return [f"{name}={value!r}" for name, value in decisive.items()]


def _list_versions() -> list[str]:
    return [f"{name} {_get_version(name)}" for name in _PACKAGES]


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def get_encoder_width(hf_config: PretrainedConfig) -> int | None:
    """Return the width of the embeddings from a model's encoders, or None if it is unknown.

    It is the width of a token's embedding, once and once more for each layer of DeepStack.
    """
    text_config = hf_config.get_text_config(decoder=True)
    widths = (getattr(text_config, name, None) for name in ("hidden_size", "d_model"))
    width = next((each for each in widths if isinstance(each, int)), None)
    deep = [
        getattr(each, "deepstack_visual_indexes", None)
        for each in (hf_config, getattr(hf_config, "vision_config", None))
    ]
    num_deep = max((len(each) for each in deep if each), default=0)
    return None if width is None else width * (1 + num_deep)
