"""Steps that every attention backend must compute, on every device: named ones and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sensorium.layers.attention.backend import PagedAttention

from .paged_step import Chunk, PagedStep, Shape

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how a step is computed; `None` for the backend: the gather of torch."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: PagedAttention | None = None

    def make_step(
        self, shape: Shape, chunks: Sequence[Chunk], windows: Windows = (None,), seed: int = 0
    ) -> PagedStep:
        return PagedStep(
            shape,
            chunks,
            windows=windows,
            seed=seed,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
        )


def _decodes(*lengths: int) -> list[Chunk]:
    return [Chunk(start=length - 1, end=length) for length in lengths]


def _mixed() -> list[Chunk]:
    return [
        *_decodes(1, 40, 5),
        Chunk(start=0, end=9),
        Chunk(start=7, end=20),
        Chunk(start=33, end=70),
    ]


_SPANS = [
    *_decodes(20),
    Chunk(start=0, end=14, spans=((2, 7), (9, 12))),
    Chunk(start=8, end=24, spans=((8, 15), (20, 24))),
    Chunk(start=5, end=9),
]
STEPS: dict[str, tuple[list[Chunk], Windows]] = {
    "a lone decode": (_decodes(37), (None,)),
    "decodes of skewed lengths": (_decodes(1, 2, 100, 3, 16, 17, 15, 64, 33, 300), (None,)),
    "whole prompts": ([Chunk(start=0, end=n) for n in (2, 16, 17, 5, 130)], (None,)),
    "chunks": ([Chunk(start=16, end=32), Chunk(start=3, end=9)], (None,)),
    "decodes, prompts and chunks": (_mixed(), (None,)),
    "a window of one": (_mixed(), (1,)),
    "a window inside a block": (_mixed(), (5,)),
    "a window over blocks": ([*_mixed(), *_decodes(200)], (33,)),
    "three groups": (_mixed(), (None, 5, 18)),
    "spans": (_SPANS, (None,)),
    "spans in windows": (_SPANS, (None, 6, 12)),
}
NUM_RANDOM_STEPS = 20


def check_named(setting: Setting, shape: Shape, name: str) -> None:
    chunks, windows = STEPS[name]
    setting.make_step(shape, chunks, windows).check()


def check_random(setting: Setting, shape: Shape, seed: int) -> None:
    generator = random.Random(seed)
    chunks = [_make_chunk(generator) for _ in range(generator.randint(1, 8))]
    windows = tuple(generator.choice((None, 1, 7, 16, 40)) for _ in range(generator.randint(1, 2)))
    setting.make_step(shape, chunks, windows, seed).check()


def _make_chunk(generator: random.Random) -> Chunk:
    start = generator.randint(0, 150)
    end = start + generator.choice((1, 1, 1, generator.randint(2, 80)))
    spans: tuple[tuple[int, int], ...] = ()
    if end - start > 8 and generator.random() < 0.2:
        spans = ((start + 2, start + 7),)
    return Chunk(start=start, end=end, spans=spans)


def check_sharing(setting: Setting, shape: Shape) -> None:
    """A sharing layer reads what its source has stored, and stores nothing itself."""
    chunks = [*_decodes(10), Chunk(start=6, end=31), Chunk(start=0, end=5)]
    step = setting.make_step(shape, chunks)
    (output,) = step.run()
    (source,) = step.caches
    stored = source.keys.clone()
    # What it would store, did it store: the keys of other tokens.
    step.sequences = [
        (query, key.flip(0) if chunk.start else key, value)
        for (query, key, value), chunk in zip(step.sequences, step.chunks, strict=True)
    ]
    shared = step.attend(replace(source, is_shared=True))
    assert torch.equal(source.keys, stored)
    assert torch.equal(shared, output)


def check_scaling(setting: Setting, shape: Shape) -> None:
    """Layers of one step may scale differently; `None` means one over the root of the size."""
    step = setting.make_step(shape, _mixed())
    (output,) = step.run()
    for scaling in (None, 0.05, 0.37):
        step.scaling = scaling  # type: ignore[assignment]
        other = step.attend(step.caches[0])
        step.scaling = shape.key_dim**-0.5 if scaling is None else scaling
        torch.testing.assert_close(
            other.cpu().float(), step.get_expected(None).float(), atol=0.04, rtol=0.04
        )
    assert torch.equal(other, output)


CHECKS: dict[str, Callable[[Setting, Shape], None]] = {
    **{
        name: lambda setting, shape, name=name: check_named(setting, shape, name)  # type: ignore[misc]
        for name in STEPS
    },
    **{
        f"random {seed}": lambda setting, shape, seed=seed: check_random(setting, shape, seed)  # type: ignore[misc]
        for seed in range(NUM_RANDOM_STEPS)
    },
    "a sharing layer": check_sharing,
    "scalings": check_scaling,
}
