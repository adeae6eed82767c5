"""Decodes thousands of damaged files, to be run in a process of its own: prints what happened.

A crash of a decoder ends this process, and with it the test that started it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from sensorium.multimodal.media.decoding import decode, resolve_decode_options
from sensorium.multimodal.media.limits import MediaLimits
from sensorium.types.errors import RequestError
from tests.media_files import make_images, make_sounds, make_videos

LIMITS = MediaLimits(max_pixels=1_000_000, max_frames=64, max_duration_s=60.0)


def damage(data: bytes, generator: np.random.Generator) -> bytes:
    """Cut short, with some bytes changed, with a piece missing, or with a piece twice."""
    kind = generator.integers(5)
    start, end = sorted(generator.integers(0, len(data) + 1, 2).tolist())
    if kind == 0:
        return data[:end]
    if kind == 1:
        return data[:start] + data[end:]
    if kind == 2:
        return data[:end] + data[start:]
    changed = bytearray(data)
    # Headers steer decoders, so that half of the changes are there.
    most = len(data) if kind == 3 else min(len(data), 200)
    for place in generator.integers(0, most, generator.integers(1, 9)).tolist():
        changed[place] = int(generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.integers(256)]))
    return bytes(changed)


def make_damaged(num_of_each: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    generator = np.random.default_rng(seed)
    files = {"image": make_images(), "audio": make_sounds(), "video": make_videos()}
    for modality, kinds in files.items():
        for kind, data in kinds.items():
            for _ in range(num_of_each):
                yield modality, kind, damage(data, generator)


def main(num_of_each: int, seed: int) -> None:
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    before_kb = None
    for modality, kind, data in make_damaged(num_of_each, seed):
        before_kb = before_kb or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        try:
            decode(
                modality,
                data,
                resolve_decode_options(modality, None),
                limits=LIMITS,
                sampling_rate=16_000,
                choose_frames=lambda metadata: range(min(4, metadata["total_num_frames"])),
            )
            outcome = "decoded"
        except RequestError:
            outcome = "refused"
        except Exception as error:
            outcome = f"{modality} {kind}: {type(error).__name__}: {error}"
        outcomes[outcome] += 1
        slowest = max(slowest, time.process_time() - started)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - (before_kb or 0)
    print(json.dumps({"outcomes": outcomes, "slowest_s": slowest, "grown_mb": grown_kb / 1024}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
