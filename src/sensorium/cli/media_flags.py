"""Flags about media: what is kept of it, where it is processed, and where it may come from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, cast

from sensorium.cli.parsing import at_least, between, parse_mapping

if TYPE_CHECKING:
    from sensorium.engine.build.media_options import MediaKwargs

_MEBIBYTE = 2**20
_MEGAPIXEL = 10**6
_MAX_GIBIBYTES = 2.0**20
_MAX_POOL_SIZE = 128
_NAMES = (
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_processor_pool_size",
    "mm_hasher_algorithm",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "allowed_local_media_path",
    "allowed_media_domains",
    "enable_mm_embeds",
    "allow_larger_media",
)


def add_media_options(
    command: argparse.ArgumentParser, *, is_server: bool = False, has_engine: bool = True
) -> None:
    """A server chooses the kind of cache and the number of processes where they are left open.
    Where there is no engine there is one kind of cache.
    """
    group = command.add_argument_group("media")
    _add_cache_size(group)
    if has_engine:
        _add_cache_kind(group, is_server=is_server)
    _add_processing(group, is_server=is_server)
    _add_sources(group)
    if is_server:
        group.add_argument(
            "--enable-mm-embeds",
            action="store_true",
            help="anyone may send media as an encoder's output, for models that allow it",
        )


def _add_cache_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mm-processor-cache-gb",
        type=between(0.0, _MAX_GIBIBYTES),
        default=4.0,
        metavar="GIB",
        help="room for processed media (default 4; 0: keep nothing)",
    )


def _add_cache_kind(group: argparse._ArgumentGroup, *, is_server: bool) -> None:
    group.add_argument(
        "--mm-processor-cache-type",
        choices=["lru", "shm"],
        default=None if is_server else "lru",
        help="lru: tensors beside the engine; shm: in shared memory (default lru"
        + ("; shm with several frontends)" if is_server else ")"),
    )
    group.add_argument(
        "--mm-shm-cache-max-object-size-mb",
        type=at_least(1),
        default=128,
        metavar="MIB",
        help="larger items are not kept in shared memory (default 128)",
    )


def _add_processing(group: argparse._ArgumentGroup, *, is_server: bool) -> None:
    most = (
        "of each frontend; 0: its own (default: half of the cores, 4 at most, divided among "
        "them, and 2 at least)"
    )
    group.add_argument(
        "--mm-processor-pool-size",
        type=at_least(0, _MAX_POOL_SIZE),
        default=None if is_server else 0,
        metavar="N",
        help="processes that decode and process media"
        + (f", {most}" if is_server else " (default 0: this one)"),
    )
    group.add_argument(
        "--media-process-deadline",
        type=float,
        metavar="SECONDS",
        help="for decoding and processing an item, from the start of that work (default 120)",
    )
    group.add_argument(
        "--media-process-wait",
        type=float,
        metavar="SECONDS",
        help="for which an item may wait until a process is free for it (default 120)",
    )
    group.add_argument(
        "--max-decoded-megapixels",
        type=at_least(1),
        metavar="N",
        help="a video whose frames to decode have more pixels in all is refused (default 20000)",
    )
    group.add_argument(
        "--mm-hasher-algorithm",
        choices=["auto", "sha256", "blake3", "sha512"],
        default="auto",
        help="what names media by content (default auto: what is fastest on this machine)",
    )
    for name, purpose in (
        ("--mm-processor-kwargs", "the model's processor gets with every item"),
        ("--media-io-kwargs", "decoders get, by modality"),
    ):
        group.add_argument(
            name, type=parse_mapping, default={}, metavar="JSON", help=f"options that {purpose}"
        )
    group.add_argument(
        "--allow-larger-media",
        action="store_true",
        help="options of a request may make a media item larger than the model's processor and "
        "--mm-processor-kwargs can (default: such an item is refused)",
    )


def _add_sources(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allowed-local-media-path",
        metavar="DIR",
        help="file: URLs may name files below it (default: none may be read)",
    )
    group.add_argument(
        "--allowed-media-domains",
        action="append",
        default=[],
        metavar="HOST",
        help="the only hosts to fetch from; .example.com means its subdomains; may be repeated "
        "(default: any public one)",
    )
    group.add_argument(
        "--allow-private-media-addresses",
        action="store_true",
        help="fetch from loopback and private networks too",
    )
    group.add_argument(
        "--max-media-mb", type=at_least(1), metavar="MIB", help="of one encoded item (default 256)"
    )
    group.add_argument(
        "--media-deadline", type=float, metavar="SECONDS", help="for fetching an item (default 30)"
    )
    group.add_argument(
        "--media-request-deadline",
        type=float,
        metavar="SECONDS",
        help="for fetching all items of one request together (default: twice --media-deadline)",
    )


def make_media_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `MediaOptions`, with the fields of `MediaLimits` as they were given."""
    given = {name: getattr(arguments, name) for name in _NAMES if hasattr(arguments, name)}
    return given | {"media_limits": _make_limits(arguments)}


def make_llm_media(arguments: argparse.Namespace) -> MediaKwargs:
    from sensorium.multimodal.limits import MediaLimits

    media: Any = make_media_kwargs(arguments)
    media["media_limits"] = MediaLimits(**media["media_limits"])
    return cast("MediaKwargs", media)


def _make_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "allow_private_addresses": arguments.allow_private_media_addresses,
    }
    if arguments.max_media_mb is not None:
        limits["max_bytes"] = arguments.max_media_mb * _MEBIBYTE
    if arguments.media_deadline is not None:
        limits["deadline_s"] = arguments.media_deadline
    if arguments.media_process_deadline is not None:
        limits["process_deadline_s"] = arguments.media_process_deadline
    if arguments.media_process_wait is not None:
        limits["process_wait_s"] = arguments.media_process_wait
    if arguments.max_decoded_megapixels is not None:
        limits["max_decoded_pixels"] = arguments.max_decoded_megapixels * _MEGAPIXEL
    if arguments.media_request_deadline is not None:
        limits["request_deadline_s"] = arguments.media_request_deadline
    return limits
