"""Paged attention equals dense attention for randomly drawn steps."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .paged_step import Chunk, PagedStep, Shape


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_kv_heads = draw(st.integers(1, 3))
    return Shape(
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        key_dim=draw(st.sampled_from((2, 4, 8))),
        value_dim=draw(st.sampled_from((2, 4, 8))),
        block_size=draw(st.sampled_from((1, 2, 3, 4, 16))),
    )


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    start = draw(st.integers(0, 40))
    length = draw(st.one_of(st.just(1), st.integers(1, 24)))
    end = start + length
    borders = sorted(draw(st.sets(st.integers(start, end), max_size=6))) if length > 1 else []
    spans = [(a, b) for a, b in zip(borders[::2], borders[1::2], strict=False)]
    return Chunk(start=start, end=end, spans=tuple(spans))


@given(
    shape=shapes(),
    step_chunks=st.lists(chunks(), min_size=1, max_size=6),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=2),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_step_equals_dense_attention(
    shape: Shape, step_chunks: list[Chunk], windows: list[int | None], seed: int
) -> None:
    PagedStep(shape, step_chunks, windows=windows, seed=seed).check()
