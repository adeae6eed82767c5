"""What the user says of media: where it may come from, how it is processed and what is kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from sensorium.models.adapter import MODALITIES
from sensorium.multimodal.hasher import ALGORITHMS, choose_algorithm
from sensorium.multimodal.limits import MediaLimits
from sensorium.types.errors import ModelError

CACHE_TYPES = ("lru", "shm")
_GIBIBYTE = 2**30
_MEBIBYTE = 2**20
_MAX_GIBIBYTES = 2**20
_MAX_POOL_SIZE = 128  # half of what may share the memory of a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """`mm_processor_cache_gb=0` keeps nothing. `mm_processor_pool_size=0` processes in the
    frontend's own process. `enable_mm_embeds`: items may come as an encoder's output, from any
    caller, where the model's family allows it. `allow_larger_media`: options of a request may make
    an item larger than the processor and `mm_processor_kwargs` can. `media_limits` with `allowed_*`
    and `deadline_s` left to the fields here.
    """

    mm_processor_cache_gb: float = 4.0
    mm_processor_cache_type: str = "lru"
    mm_shm_cache_max_object_size_mb: int = 128
    mm_processor_pool_size: int = 0
    mm_hasher_algorithm: str = "auto"
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allowed_local_media_path: str | os.PathLike[str] | None = None
    allowed_media_domains: Sequence[str] = ()
    enable_mm_embeds: bool = False
    allow_larger_media: bool = False
    media_limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        if self.mm_processor_cache_type not in CACHE_TYPES:
            raise ModelError(
                f"mm_processor_cache_type must be {' or '.join(CACHE_TYPES)}, "
                f"not {self.mm_processor_cache_type!r}"
            )
        if self.mm_hasher_algorithm not in ("auto", *ALGORITHMS):
            raise ModelError(
                f"mm_hasher_algorithm must be auto, {', '.join(ALGORITHMS)}, "
                f"not {self.mm_hasher_algorithm!r}"
            )
        self._check_numbers()
        self._check_mappings()
        self._check_sources()

    def _check_numbers(self) -> None:
        gibibytes = self.mm_processor_cache_gb
        if not _is_number(gibibytes) or not 0 <= gibibytes <= _MAX_GIBIBYTES:
            raise ModelError(f"mm_processor_cache_gb must be a number >= 0, not {gibibytes!r}")
        for name, least, most in (
            ("mm_processor_pool_size", 0, _MAX_POOL_SIZE),
            ("mm_shm_cache_max_object_size_mb", 1, _MAX_GIBIBYTES),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ModelError(f"{name} must be an integer from {least} to {most}, not {value!r}")

    def _check_mappings(self) -> None:
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if not isinstance(getattr(self, name), Mapping):
                raise ModelError(f"{name} must be a mapping")
        unknown = sorted(map(str, set(self.media_io_kwargs) - set(MODALITIES)))
        if unknown:
            raise ModelError(
                f"media_io_kwargs names {', '.join(unknown)}: use {', '.join(MODALITIES)}"
            )

    def _check_sources(self) -> None:
        domains = self.allowed_media_domains
        if isinstance(domains, str) or not all(isinstance(domain, str) for domain in domains):
            raise ModelError("allowed_media_domains must be a list of host names")
        path = self.allowed_local_media_path
        is_path = isinstance(path, str | os.PathLike) and bool(os.fspath(path))
        if path is not None and not (is_path and Path(path).is_dir()):
            raise ModelError(f"allowed_local_media_path {str(path)!r} is not a directory")
        for name in ("enable_mm_embeds", "allow_larger_media"):
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false")
        if not isinstance(self.media_limits, MediaLimits):
            raise ModelError("media_limits must be MediaLimits")

    @property
    def hasher_algorithm(self) -> str:
        if self.mm_hasher_algorithm == "auto":
            return choose_algorithm(platform.machine())
        return self.mm_hasher_algorithm

    @property
    def capacity_bytes(self) -> int:
        return int(self.mm_processor_cache_gb * _GIBIBYTE)

    @property
    def has_shared_memory(self) -> bool:
        return self.mm_processor_cache_type == "shm" and self.capacity_bytes > 0

    @property
    def max_object_bytes(self) -> int:
        return self.mm_shm_cache_max_object_size_mb * _MEBIBYTE

    def get_limits(self) -> MediaLimits:
        limits = self.media_limits
        if self.allowed_media_domains:
            limits = replace(limits, allowed_domains=frozenset(self.allowed_media_domains))
        if self.allowed_local_media_path is not None:
            limits = replace(limits, allowed_local_path=Path(self.allowed_local_media_path))
        return limits


class MediaKwargs(TypedDict, total=False):
    """The fields of `MediaOptions`, for callers."""

    mm_processor_cache_gb: float
    mm_processor_cache_type: str
    mm_shm_cache_max_object_size_mb: int
    mm_processor_pool_size: int
    mm_hasher_algorithm: str
    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Mapping[str, Any]]
    allowed_local_media_path: str | os.PathLike[str] | None
    allowed_media_domains: Sequence[str]
    enable_mm_embeds: bool
    allow_larger_media: bool
    media_limits: MediaLimits


def make_media_options(given: MediaKwargs) -> MediaOptions:
    unknown = sorted(set(given) - set(MediaKwargs.__annotations__))
    if unknown:
        raise TypeError(f"unknown option(s): {', '.join(unknown)}")
    return MediaOptions(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
