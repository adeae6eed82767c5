"""The options of an engine: how it is loaded, how it runs, and how it takes media.

These are the only declarations of these options. This module does not import torch, so that the
command line and the parent of a server's processes can use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.layers.attention import ATTENTION_BACKENDS
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.tiers.address import parse_address
from sensorium.types.errors import ModelError
from sensorium.types.multimodal import HASH_ALGORITHMS, MODALITIES
from sensorium.types.options import (
    ALL_COMMANDS,
    ENGINES,
    MEDIA_COMMANDS,
    SERVE,
    SERVERS,
    TOWERS,
    Kind,
    check_options,
    option,
)

serve_option = partial(option, commands=SERVE)  # a flag of `serve` and `deploy`
server_option = partial(option, commands=SERVERS)  # also a flag of `render`
engine_option = partial(option, commands=ENGINES)  # a flag of all commands that run a model
common_option = partial(option, commands=ALL_COMMANDS)  # a flag of those commands and of `render`
tower_option = partial(option, commands=TOWERS)  # a flag of all commands that load weights
media_option = partial(option, commands=MEDIA_COMMANDS)  # a flag of all commands that process media


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingOptions:
    """The options for where a model comes from and how it is loaded.

    A torch dtype, a torch device and a path may also be given; they are converted to text.
    """

    model: str = EMBEDDED_MODEL
    dtype: str = tower_option(
        "auto",
        section="loading",
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms=(("half", "float16"), ("float", "float32")),  # as in vLLM
        help="The precision of the weights. With auto it is the checkpoint's on CUDA; on a CPU it "
        "is float32, unless the CPU has bfloat16 instructions and the checkpoint is in bfloat16.",
    )
    device: str = tower_option(
        "auto",
        metavar="DEVICE",
        help="The device that computes: cpu, cuda, or auto for CUDA where there is a GPU.",
    )
    revision: str | None = media_option(
        None,
        kind="text",
        metavar="NAME",
        default_text="main",
        help="The branch, tag or commit of a hub id.",
    )
    trust_remote_code: bool = media_option(
        False, help="Run code that the checkpoint brings. Without it such a model is refused."
    )
    use_tqdm_on_load: bool = option(
        True, help="Show the progress of long loads, if stderr is a terminal."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike):
            raise ModelError(
                f"model must be a directory or a hub id, not {type(self.model).__name__}"
            )
        object.__setattr__(self, "model", str(os.fspath(self.model)))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "device", str(self.device))
        check_options(self)


def _most(help_text: str, *, default_text: str, kind: Kind = "integer") -> Any:
    """Return a field for an upper limit: an integer >= 1, or `None` if the user sets none."""
    return serve_option(
        None, kind=kind, least=1, metavar="N", default_text=default_text, help=help_text
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options for how an engine computes. Where a value is `None`, the engine chooses one."""

    max_model_len: int | None = common_option(
        None,
        section="engine",
        kind="tokens",
        least=1,
        metavar="N",
        default_text="the model's context, cut to what the KV cache holds",
        help="The context length in tokens. The command line also takes 4k (4000), 4K (4096) and "
        "auto.",
    )
    max_num_seqs: int | None = _most(
        "The most requests in a step.", default_text="32 on a CPU, 256 on CUDA"
    )
    max_num_batched_tokens: int | None = _most(
        "The most tokens in a step. The command line also takes 8k (8000) and 8K (8192).",
        default_text="512 on a CPU, 8192 on CUDA",
        kind="tokens",
    )
    long_prefill_token_threshold: int | None = serve_option(
        None,
        kind="integer",
        least=0,
        metavar="N",
        default_text="512 on a CPU, 2048 on CUDA, but at most max_num_batched_tokens",
        help="A prompt with more tokens that are not cached is long. While others wait for their "
        "first token, long prompts together have at most so many tokens in a step, and at most "
        "half of it; on a CPU they also pause while others run. With 0 no prompt is long.",
    )
    kv_cache_memory_bytes: int | None = serve_option(
        None,
        kind="bytes",
        least=1,
        metavar="BYTES",
        default_text="room for all requests at full length, but at most a quarter of the free "
        "memory on a CPU and all of it on CUDA",
        help="The memory for keys and values. The command line also takes a unit, as in 4G.",
    )
    encoder_cache_size: int | None = _most(
        "The most media embeddings that are kept for later requests.", default_text="16384"
    )
    max_num_encoder_embeds: int | None = _most(
        "The most media embeddings that are computed in a step.",
        default_text="max_num_batched_tokens if that is given, else 2048 on a CPU, 8192 on CUDA",
    )
    block_size: int = serve_option(
        16, least=1, metavar="N", help="The number of tokens in a block of the KV cache."
    )
    enable_prefix_caching: bool = serve_option(
        True, help="Keep the KV blocks of earlier prompts for later ones."
    )
    disable_chunked_mm_input: bool = serve_option(
        False, help="Compute all tokens of a media item in one step."
    )
    scheduling_policy: str = serve_option(
        "fcfs",
        choices=("fcfs", "priority"),
        help="Which request is served first: the one that came first (fcfs), or the one with the "
        "lower priority value (priority).",
    )
    attention_backend: str = engine_option(
        "auto",
        choices=ATTENTION_BACKENDS,
        help="The kernels that attend to the KV cache. With auto it is the first of these that "
        "runs the model here and passes a trial. docs/gpu.md lists what each of them needs.",
    )
    enforce_eager: bool = engine_option(
        False, help="Launch every kernel of a step instead of replaying CUDA graphs."
    )
    overlap: bool = engine_option(
        True,
        help="On CUDA, plan each step while the device still computes the one before it. A CPU "
        "computes one step after the other.",
    )
    fusion: bool = engine_option(
        True,
        help="On CUDA, compute norms, rotary positions, gated layers and joined products in fewer "
        "kernels, where these agree with the model's own.",
    )
    cuda_graph_sizes: Sequence[int] | None = engine_option(
        None,
        kind="sizes",
        metavar="N,N,...",
        default_text="1,2,4,8, then every eighth up to max_num_seqs",
        help="The batch sizes for which decoding steps have a CUDA graph. A batch is padded to the "
        "next size; a larger one runs without a graph.",
    )
    limit_mm_per_prompt: Mapping[str, int] = server_option(
        {},
        kind="counts",
        metavar="COUNTS",
        default_text="no limit",
        help="The most items of a modality in one prompt. The command line takes JSON, or "
        "image=4,video=1.",
    )
    gpu_memory_utilization: float = engine_option(
        0.9,
        above=0,
        most=1,
        metavar="SHARE",
        help="The share of a CUDA device's memory that may be in use. A model that does not fit is "
        "refused before it is loaded.",
    )
    generation_config: str = server_option(
        "auto",
        choices=("auto", "none"),
        synonyms=(("vllm", "none"),),  # as in vLLM
        help="Whether the checkpoint's generation_config.json decides what a request leaves open "
        "(auto). With none, only its end-of-sequence tokens count; Whisper's transcripts follow it "
        "with both.",
    )
    structured_string_limit: int | None = server_option(
        None,
        kind="integer",
        least=0,
        metavar="N",
        default_text="what the model's generation_config.json has, which is no limit for most "
        "models",
        help="Bound answers that follow a JSON schema: strings that the schema leaves free have at "
        "most N characters, and numbers and lists are also bounded. 0 means no limit.",
    )
    seed: int = server_option(
        0, metavar="N", help="The seed from which requests without a seed of their own get theirs."
    )

    def __post_init__(self) -> None:
        if self.limit_mm_per_prompt is None:
            object.__setattr__(self, "limit_mm_per_prompt", {})
        check_options(self)
        if self.cuda_graph_sizes is not None:
            object.__setattr__(self, "cuda_graph_sizes", tuple(self.cuda_graph_sizes))
        _check_media_counts(self.limit_mm_per_prompt)

    @property
    def allowed_modalities(self) -> tuple[str, ...]:
        """Return all modalities except those with a limit of 0 in `limit_mm_per_prompt`."""
        return tuple(m for m in MODALITIES if self.limit_mm_per_prompt.get(m) != 0)


def _check_media_counts(counts: Mapping[str, Any]) -> None:
    """Raise a `ModelError` unless all keys are modalities and all values are integers >= 0."""
    for modality, count in counts.items():
        if modality not in MODALITIES:
            raise ModelError(
                f"limit_mm_per_prompt has the unknown modality {modality!r}: "
                f"use {', '.join(MODALITIES)}"
            )
        if type(count) is not int or count < 0:
            raise ModelError(
                f"limit_mm_per_prompt: {modality} must be an integer >= 0, not {count!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """The options for where media may come from, how it is processed, and how it is cached."""

    mm_processor_cache_gb: float = media_option(
        4.0,
        section="media",
        least=0,
        most=2**20,
        metavar="GIB",
        help="The room for processed media, in GiB. It takes memory as it fills. 0 keeps nothing.",
    )
    mm_processor_cache_type: str = engine_option(
        "lru",
        server_default="lru, or shm with several frontends",
        choices=("lru", "shm"),
        help="Where processed media is kept: as tensors next to the engine (lru), or in shared "
        "memory (shm).",
    )
    mm_shm_cache_max_object_size_mb: int = engine_option(
        128,
        least=1,
        most=2**20,
        metavar="MIB",
        help="The largest item that is kept in shared memory, in MiB.",
    )
    mm_disk_cache: str | None = media_option(
        None,
        kind="text",
        metavar="DIR",
        default_text="none",
        help="A directory in which processed media and encoder outputs are also kept, so that a "
        "server that starts again need not decode or encode them again. Several servers on one "
        "machine may share it.",
    )
    mm_disk_cache_gb: float = media_option(
        32.0,
        above=0,
        most=2**20,
        metavar="GIB",
        help="The room for that directory, in GiB. What was not used for the longest time makes "
        "room for what is new.",
    )
    mm_remote_cache: str | None = media_option(
        None,
        kind="text",
        metavar="URL",
        default_text="none",
        is_secret=True,
        help="A Redis in which processed media and encoder outputs are also kept, so that servers "
        "on several machines share them: redis://HOST:PORT/DB, rediss:// for TLS, or unix:///PATH. "
        "It needs the package redis.",
    )
    mm_remote_cache_ttl: int = media_option(
        604_800,
        least=0,
        most=10**9,
        metavar="SECONDS",
        help="How long that Redis keeps an entry that is not used. 0 means until Redis needs the "
        "room.",
    )
    mm_processor_pool_size: int = media_option(
        0,
        server_default="half of the cores, at most 4, divided among the frontends, but at least 2",
        least=0,
        most=128,  # half of the processes that may share the memory of a cache
        metavar="N",
        help="The number of processes that decode and process media, for each frontend of a "
        "server. With 0 it is done in the process itself.",
    )
    mm_processor_threads: int = media_option(
        1,
        server_default="1; with a GPU the cores that are left, at most 4",
        least=1,
        most=256,
        metavar="N",
        help="The number of threads with which each of these processes computes.",
    )
    mm_hasher_algorithm: str = common_option(
        "auto",
        choices=("auto", *HASH_ALGORITHMS),
        help="The hash function that names media by content. With auto it is the fastest on this "
        "machine.",
    )
    mm_processor_kwargs: Mapping[str, Any] = media_option(
        {},
        kind="mapping",
        metavar="JSON",
        help="Options that the model's processor gets with every item.",
    )
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = media_option(
        {}, kind="mapping", metavar="JSON", help="Options that decoders get, by modality."
    )
    allow_larger_media: bool = media_option(
        False,
        help="Let the options of a request make a media item larger than the model's processor and "
        "mm_processor_kwargs do. Without it such an item is refused.",
    )
    allowed_local_media_path: str | None = common_option(
        None,
        kind="text",
        metavar="DIR",
        default_text="none, so that no file can be read",
        help="The directory below which file: URLs may name files.",
    )
    allowed_media_domains: Sequence[str] = common_option(
        (),
        kind="texts",
        metavar="HOST",
        default_text="any public one",
        help="The only hosts to fetch media from. .example.com means its subdomains.",
    )
    enable_mm_embeds: bool = server_option(
        False,
        help="Let any client send media as the output of an encoder, for models that allow it.",
    )
    encoder: str | None = engine_option(
        None,
        section="remote encoder",
        kind="text",
        metavar="unix:PATH",
        default_text="none, so that the engine encodes everything itself",
        help="The socket of an encoder on this machine (sensorium encode), which encodes large "
        "media in place of the engine. docs/scaling.md explains it.",
    )
    encode_above: int = engine_option(
        0,
        kind="bytes",
        least=0,
        most=2**63 - 1,
        metavar="BYTES",
        help="The size of media up to which the engine encodes it itself: that of the file as it "
        "came, or of the pixels or samples from Python. 0 gives everything to the encoder. The "
        "command line also takes a unit, as in 64K.",
    )
    encoder_fallback: bool = engine_option(
        True,
        help="Encode in the engine if the encoder can't be reached or has no room. Without it such "
        "requests fail, and may be sent again.",
    )
    encoder_timeout: float = engine_option(
        60.0,
        above=0,
        most=86_400,
        metavar="SECONDS",
        help="The time that the encoder may take for an item.",
    )
    media_limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        for name in ("allowed_local_media_path", "mm_disk_cache"):
            if isinstance(given := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, str(os.fspath(given)))
        path = self.allowed_local_media_path
        check_options(self)
        if self.encoder is not None and not self.encoder.startswith("unix:"):
            raise ModelError(f"encoder must be unix:PATH, not {self.encoder[:200]!r}")
        object.__setattr__(self, "allowed_media_domains", tuple(self.allowed_media_domains))
        if path is not None and not (path and Path(path).is_dir()):
            raise ModelError(f"allowed_local_media_path {str(path)!r} is not a directory")
        unknown = sorted(map(str, set(self.media_io_kwargs) - set(MODALITIES)))
        if unknown:
            raise ModelError(
                f"media_io_kwargs has the unknown modality {', '.join(unknown)}: "
                f"use {', '.join(MODALITIES)}"
            )
        if not isinstance(self.media_limits, MediaLimits):
            raise ModelError("media_limits must be an instance of MediaLimits")
        if self.mm_remote_cache is not None:
            parse_address(self.mm_remote_cache)

    @property
    def capacity_bytes(self) -> int:
        return int(self.mm_processor_cache_gb * 2**30)

    @property
    def has_shared_memory(self) -> bool:
        return self.mm_processor_cache_type == "shm" and self.capacity_bytes > 0

    @property
    def max_object_bytes(self) -> int:
        return self.mm_shm_cache_max_object_size_mb * 2**20

    def get_limits(self) -> MediaLimits:
        """Return `media_limits` with the hosts and the local directory that these options allow."""
        limits = self.media_limits
        if self.allowed_media_domains:
            limits = replace(limits, allowed_domains=frozenset(self.allowed_media_domains))
        if self.allowed_local_media_path is not None:
            limits = replace(limits, allowed_local_path=Path(self.allowed_local_media_path))
        return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """The options of a remote encoder, in addition to those that it shares with engines."""

    socket: str = option(
        "",
        section="encoder",
        metavar="PATH",
        commands=("encode",),
        default_text="none; it must be given",
        help="The socket to listen on. Engines get it as --encoder unix:PATH. Only processes of "
        "the same user can use it.",
    )
    max_items: int = option(
        64,
        least=1,
        most=4096,
        metavar="N",
        commands=("encode",),
        help="The most media items at once. Engines encode more than that themselves.",
    )
    max_connections: int = option(
        256,
        least=1,
        most=4096,
        metavar="N",
        commands=("encode",),
        help="The most connections at once. Each frontend of an engine has up to 8.",
    )
    max_batch_embeds: int | None = option(
        None,
        kind="integer",
        least=1,
        metavar="N",
        default_text="2048 on a CPU, 8192 on CUDA",
        commands=("encode",),
        help="The most embeddings that are computed together. A larger item is computed alone.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.socket:
            raise ModelError("an encoder needs a socket to listen on: give --socket PATH")
