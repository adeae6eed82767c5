"""Decodes harmful files and damaged files in a process of its own, and prints the results.

If a decoder crashes, it ends this process only, and the test that started it fails. Another
process makes the harmful files and sends them here, so that making them takes no memory of this
one.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from sensorium.multimodal.decoding.decoding import decode, resolve_decode_options
from sensorium.multimodal.decoding.guards import limit_memory_growth
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError
from tests.support.media import make_audios, make_images, make_videos

SMALL = MediaLimits(max_pixels=1_000_000, max_frames=64, max_duration_s=60.0)
CEILING_MB = 256


def try_to_decode(modality: str, data: bytes, limits: MediaLimits) -> str:
    """Return an empty string if the data was decoded, or else the reason why it was not."""
    try:
        decode(
            modality,
            data,
            resolve_decode_options(modality, None),
            limits=limits,
            sampling_rate=16_000,
            choose_frames=lambda metadata: range(min(4, metadata["total_num_frames"])),
        )
    except RequestError as error:
        return str(error)
    return ""


def get_peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def try_bomb(modality: str, data: bytes) -> dict[str, object]:
    before = get_peak_mb()
    outcome = try_to_decode(modality, data, MediaLimits())
    return {"outcome": outcome, "num_bytes": len(data), "grown_mb": get_peak_mb() - before}


def damage(data: bytes, generator: np.random.Generator) -> bytes:
    """Return the data cut short, without a piece, with a piece twice, or with changed bytes."""
    kind = generator.integers(5)
    start, end = sorted(generator.integers(0, len(data) + 1, 2).tolist())
    if kind == 0:
        return data[:end]
    if kind == 1:
        return data[:start] + data[end:]
    if kind == 2:
        return data[:end] + data[start:]
    changed = bytearray(data)
    # Decoders follow the headers, so half of the files with changed bytes are changed there only.
    most = len(data) if kind == 3 else min(len(data), 200)
    for place in generator.integers(0, most, generator.integers(1, 9)).tolist():
        changed[place] = int(generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.integers(256)]))
    return bytes(changed)


def make_damaged(num_of_each: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    generator = np.random.default_rng(seed)
    files = {"image": make_images(), "audio": make_audios(), "video": make_videos()}
    for modality, kinds in files.items():
        for kind, data in kinds.items():
            for _ in range(num_of_each):
                yield modality, kind, damage(data, generator)


def try_damaged(num_of_each: int, seed: int) -> dict[str, object]:
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    before = get_peak_mb()
    for modality, kind, data in make_damaged(num_of_each, seed):
        started = time.process_time()
        try:
            outcome = "refused" if try_to_decode(modality, data, SMALL) else "decoded"
        except Exception as error:
            outcome = f"{modality} {kind}: {type(error).__name__}: {error}"
        outcomes[outcome] += 1
        slowest_s = max(slowest_s, time.process_time() - started)
    return {"outcomes": outcomes, "slowest_s": slowest_s, "grown_mb": get_peak_mb() - before}


def main(num_of_each: int, seed: int) -> None:
    """Decode the harmful and the damaged files, and print the results as JSON.

    The last harmful file comes at the end, because it is decoded under a limit of memory that
    stays in force.
    """
    for modality, kinds in (("image", make_images()), ("video", make_videos())):
        for data in kinds.values():  # loads the libraries before memory is measured
            try_to_decode(modality, data, SMALL)
    bombs = []
    while header := sys.stdin.buffer.read(16):
        modality, num_bytes = header[:8].decode().strip(), int.from_bytes(header[8:], "big")
        data = sys.stdin.buffer.read(num_bytes)
        if not sys.stdin.buffer.peek(1):
            break
        bombs.append(try_bomb(modality, data))
    damaged = try_damaged(num_of_each, seed)
    limit_memory_growth(CEILING_MB * 2**20)
    table = try_bomb(modality, data)
    print(json.dumps({"bombs": bombs, "damaged": damaged, "table": table}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
