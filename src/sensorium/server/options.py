"""What the user says of a server, as one value that goes to all of its processes.

Free of torch: the process that supervises the others has it too. `loading`, `engine` and `media`
are for the processes that build an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sensorium.types.errors import RequestError
from sensorium.types.sampling import MAX_N

if TYPE_CHECKING:
    from sensorium.engine.build.builder import Source
    from sensorium.engine.build.config import EngineOptions
    from sensorium.engine.build.media_options import MediaOptions

DEFAULT_CACHE_GB = 4.0
_GIBIBYTE = 2**30
_MEBIBYTE = 2**20

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`loading`, `engine`: keywords of `Source` and `EngineOptions`. `media`: those of
    `MediaOptions`, with the fields of `MediaLimits` as `media_limits`.

    `max_concurrent_requests` is the sum over all frontends. `max_body_mb`: of one request; a chat
    of several videos as base64 still fits. `port` 0: any free one. `trust_injected`: hashes of
    media that come over the wire are taken as they are. `is_render_only`: there is no core, and
    no weights are loaded. `tool_call_parser`, `reasoning_parser`: names of formats, "auto" (found
    by looking at the model) or "none".
    """

    model: str
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_server_count: int = 1
    shutdown_timeout: float = 30.0
    # Seconds without progress after which a core counts as stalled; 0: it is not watched.
    core_stall_timeout: float = 60.0
    max_concurrent_requests: int = 512
    max_body_mb: int = 512
    max_n: int = MAX_N  # completions of one prompt
    stream_timeout: float = 60.0  # seconds in which a client reads nothing; 0: it may
    head_timeout: float = 30.0  # seconds, for the line and the headers of a request
    body_timeout: float = 600.0  # seconds, for a whole body
    min_body_rate: int = 8  # KiB a second
    max_unfinished_bodies_mb: int = 1024  # of all bodies that are still coming, per frontend
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    share_uuids: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    trust_injected: bool = False
    warmup: bool = True
    is_render_only: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    protect_metrics: bool = False
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    access_log: bool = True
    loading: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    media: dict[str, Any] = {}

    def __post_init__(self) -> None:
        is_shared = self.api_server_count > 1 and not self.is_render_only
        if is_shared and self.has_processor_cache and not self.shm_capacity_bytes:
            raise RequestError(
                f"api_server_count={self.api_server_count}: several frontends share their cache of "
                "media. Use mm_processor_cache_type=shm, or mm_processor_cache_gb=0 for none"
            )

    @property
    def has_processor_cache(self) -> bool:
        return bool(self.media.get("mm_processor_cache_gb", DEFAULT_CACHE_GB))

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may call the model; the first is what answers call it."""
        return self.served_model_name or (self.model,)

    @property
    def shm_capacity_bytes(self) -> int:
        """Of the memory that processes share for media; 0: they share none."""
        if self.is_render_only or self.media.get("mm_processor_cache_type") != "shm":
            return 0
        return int(self.media.get("mm_processor_cache_gb", DEFAULT_CACHE_GB) * _GIBIBYTE)

    @property
    def shm_max_object_bytes(self) -> int:
        return int(self.media.get("mm_shm_cache_max_object_size_mb", 128)) * _MEBIBYTE


def make_source(options: ServeOptions, *, use_tqdm: bool) -> Source:
    from sensorium.engine.build.builder import Source

    return Source(**{**options.loading, "model": options.model, "use_tqdm_on_load": use_tqdm})


def make_engine_options(options: ServeOptions) -> EngineOptions:
    from sensorium.engine.build.config import EngineOptions

    return EngineOptions(**{**options.engine, "generation_config": options.generation_config})


def make_media_options(options: ServeOptions) -> MediaOptions:
    from sensorium.engine.build.media_options import MediaOptions
    from sensorium.multimodal.limits import MediaLimits

    limits = MediaLimits(**options.media.get("media_limits", {}))
    return MediaOptions(**{**options.media, "media_limits": limits})
