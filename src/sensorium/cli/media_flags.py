"""Flags about media: what is kept of it, where it is processed, and where it may come from."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sensorium.engine.media_options import MediaKwargs

_MEBIBYTE = 2**20


def add_media_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("media")
    _add_processing(group)
    _add_sources(group)


def _add_processing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mm-processor-cache-gb",
        type=float,
        default=4.0,
        metavar="GIB",
        help="room for processed media (default 4; 0: keep nothing)",
    )
    group.add_argument(
        "--mm-processor-cache-type",
        choices=["lru", "shm"],
        default="lru",
        help="lru: tensors beside the engine; shm: in shared memory (default lru)",
    )
    group.add_argument(
        "--mm-shm-cache-max-object-size-mb",
        type=int,
        default=128,
        metavar="MIB",
        help="larger items are not kept in shared memory (default 128)",
    )
    group.add_argument(
        "--mm-processor-pool-size",
        type=int,
        default=0,
        metavar="N",
        help="processes that decode and process media (default 0: this one)",
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
            name, type=_parse_mapping, default={}, metavar="JSON", help=f"options that {purpose}"
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
        "--max-media-mb", type=int, metavar="MIB", help="of one encoded item (default 256)"
    )
    group.add_argument(
        "--media-deadline", type=float, metavar="SECONDS", help="for fetching an item (default 30)"
    )


def make_media_kwargs(arguments: argparse.Namespace) -> MediaKwargs:
    from sensorium.multimodal.media.limits import MediaLimits

    limits = MediaLimits(allow_private_addresses=arguments.allow_private_media_addresses)
    if arguments.max_media_mb is not None:
        limits = replace(limits, max_bytes=arguments.max_media_mb * _MEBIBYTE)
    if arguments.media_deadline is not None:
        limits = replace(limits, deadline_s=arguments.media_deadline)
    return {
        "mm_processor_cache_gb": arguments.mm_processor_cache_gb,
        "mm_processor_cache_type": arguments.mm_processor_cache_type,
        "mm_shm_cache_max_object_size_mb": arguments.mm_shm_cache_max_object_size_mb,
        "mm_processor_pool_size": arguments.mm_processor_pool_size,
        "mm_hasher_algorithm": arguments.mm_hasher_algorithm,
        "mm_processor_kwargs": arguments.mm_processor_kwargs,
        "media_io_kwargs": arguments.media_io_kwargs,
        "allowed_local_media_path": arguments.allowed_local_media_path,
        "allowed_media_domains": arguments.allowed_media_domains,
        "media_limits": limits,
    }


def _parse_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value
