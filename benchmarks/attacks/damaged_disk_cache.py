"""Attack 25: pictures with entries in the disk cache that are damaged, far too long, or senseless.

A file of terabytes takes no room on the disk and minutes to read, a length of 400 digits is no
number that a process may take, and an entry with a right checksum may describe what no model makes.
Only the server's user can write them, but every client may ask for the pictures that they are for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import torch

from attacks.asking import keep_asking
from attacks.neighbours import make_new_picture, make_picture_part
from live_server import LiveServer
from sensorium.multimodal.tiers.heads import HEAD_BYTES, make_head
from sensorium.multimodal.tiers.tiers import _decode, _encode

# The caches in memory have room for half of the pictures, so each one is looked up on the disk. The
# disk has room for files that claim to have terabytes: else they would be removed at the start.
FLAGS: tuple[str, ...] = (
    *("--mm-processor-cache-gb", "0.075", "--encoder-cache-size", "4096"),
    *("--mm-disk-cache-gb", "1000000"),
)
NUM_PICTURES = 128
_NUM_CLIENTS = 2
_MAX_REQUESTS = 2000  # of each client, so that the attack ends by itself
_PAUSE_S = 0.2  # so ten a second at most: an attack by damage, not by number
_TIMEOUT_S = 300.0
_MAX_BYTES = 2**24  # of an entry that the server has written
_LARGE = 2**63 - 1
_LAYOUTS: tuple[dict[str, Any], ...] = (
    *({"num_embeds": number} for number in (0, -5, 65, _LARGE)),
    *({"token_id": -_LARGE}, {"text": ""}, {"text": "What?"}),
)


def _flip(place: int) -> Callable[[Path, int], None]:
    def damage(path: Path, _: int) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return damage


def _lengthen(num_bytes: int) -> Callable[[Path, int], None]:
    return lambda path, _: os.truncate(path, num_bytes)


def _cut(num_bytes: int) -> Callable[[Path, int], None]:
    return lambda path, _: os.truncate(path, min(num_bytes, path.stat().st_size - 1))


def _replace_by_pipe(path: Path, _: int) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_link(path: Path, _: int) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _make_senseless(path: Path, number: int) -> None:
    """Write an entry with a right checksum that no processor and no encoder has made."""
    entry = _decode(bytearray(path.read_bytes()[HEAD_BYTES:]))
    if entry is None:
        return
    head, tensors = entry
    layout = head.layout
    if layout is not None:
        layout = replace(layout, **_LAYOUTS[number % len(_LAYOUTS)])
    else:
        odd = (torch.nan * torch.ones(64, 384), torch.zeros(0), torch.ones(2, 3, 5))
        tensors = dict.fromkeys(tensors, odd[number % len(odd)])
    parts = _encode(tensors, modality=head.modality, layout=layout, order=head.order)
    path.unlink()
    path.write_bytes(b"".join([make_head(path.name.removesuffix(".entry"), parts), *parts]))


DAMAGES: tuple[Callable[[Path, int], None], ...] = (
    *(_flip(0), _make_senseless, _flip(20), _lengthen(2**43), _flip(64), _make_senseless),
    *(_cut(0), _replace_by_pipe, _cut(10), _lengthen(2**34), _cut(_LARGE), _replace_by_link),
    *(_make_senseless, _flip(-1), _lengthen(2**29 + 1)),
)


@contextmanager
def prepare(model: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """Let a server fill a cache in this folder, damage it, and give flags for another server."""
    pictures, cache = folder / "pictures", folder / "cache"
    pictures.mkdir()
    for number in range(NUM_PICTURES):
        (pictures / f"{number}.png").write_bytes(make_new_picture())
    flags = ("--mm-disk-cache", str(cache))
    with LiveServer(model, "--port", "0", *FLAGS, *flags, log=folder / "filling.log") as server:
        url = server.wait_for_url()
        with ThreadPoolExecutor(4) as threads, httpx.Client(timeout=_TIMEOUT_S) as client:
            for answer in threads.map(lambda each: _ask(client, url, each, 0), pictures.iterdir()):
                answer.raise_for_status()
    for number, mm_hash in enumerate(_list_hashes(cache)):
        damage(cache, mm_hash, number)
    yield flags


@contextmanager
def attack(url: str, folder: Path) -> Iterator[list[int]]:
    """Ask for all the pictures in turns, and damage the entries of each again between its turns.

    `folder` is that of `prepare`; an attack continues where the one before has ended. The list
    fills with the answers' statuses.
    """
    pictures, cache, place = sorted((folder / "pictures").iterdir()), folder / "cache", folder / "n"
    hashes = _list_hashes(cache)
    numbers = count(int(place.read_text()) if place.exists() else 0)

    def ask(client: httpx.Client) -> httpx.Response:
        number = next(numbers)
        # Each picture and each hash has one turn in a round, so they need not belong together.
        if number >= len(hashes):
            damage(cache, hashes[number % len(hashes)], number + number // len(hashes))
        return _ask(client, url, pictures[number % len(pictures)], number)

    with keep_asking(
        url,
        ask,
        num_clients=_NUM_CLIENTS,
        max_requests=_MAX_REQUESTS,
        timeout_s=_TIMEOUT_S,
        pause_s=_PAUSE_S,
    ) as statuses:
        yield statuses
    place.write_text(str(next(numbers)))


def damage(cache: Path, mm_hash: str, number: int) -> None:
    """Damage all entries of a picture that are whole, each in another way, and the count."""
    (cache / "taken").write_bytes(b"9" * 400)
    for place, path in enumerate(sorted((cache / mm_hash[:2]).glob(f"{mm_hash}.*"))):
        with suppress(FileNotFoundError):  # the server has removed it just now
            is_whole = path.is_file() and not path.is_symlink()
            if is_whole and HEAD_BYTES < path.stat().st_size < _MAX_BYTES:
                DAMAGES[(number + place) % len(DAMAGES)](path, number // len(DAMAGES))


def _list_hashes(cache: Path) -> list[str]:
    hashes = sorted({path.name.split(".")[0] for path in cache.glob("*/*.entry")})
    return hashes[:NUM_PICTURES]


def _ask(client: httpx.Client, url: str, picture: Path, number: int) -> httpx.Response:
    # The number comes first, so that the prompt is no known one.
    text = {"type": "text", "text": f"{number}: what is this?"}
    content = [text, make_picture_part(picture.read_bytes())]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return client.post(f"{url.rstrip('/')}/v1/chat/completions", json=body)
