"""Deliberate mistakes in what a replayed step reads: a check has to see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from sensorium.worker.graphs import decode_buffers, segments
from sensorium.worker.graphs.decode_buffers import DecodeBuffers

_make_arrays = DecodeBuffers._make_arrays
_FIRST_SLOT = 17  # of the first request: blocks have 16 slots, and one is the null block


def _shift_slots(self: DecodeBuffers, columns: Any, *others: Any) -> Any:
    arrays: Any = _make_arrays(self, columns, *others)
    arrays["slots0"][: len(columns.rows)] += 1
    return arrays


def _forget_the_new_token(self: DecodeBuffers, columns: Any, *others: Any) -> Any:
    arrays: Any = _make_arrays(self, columns, *others)
    arrays["seq_lens"][: len(columns.rows)] -= 1
    return arrays


def _make_no_table(self: DecodeBuffers, *given: Any) -> Any:
    arrays: Any = _make_arrays(self, *given)
    arrays["tables0"] = arrays["tables0"][:, :0]
    return arrays


_PATCHES: dict[str, Any] = {
    "padding that writes": lambda: patch.object(decode_buffers, "NO_SLOT", _FIRST_SLOT),
    "padding of prompts that writes": lambda: patch.object(segments, "NO_SLOT", _FIRST_SLOT),
    "a shifted slot": lambda: patch.object(DecodeBuffers, "_make_arrays", _shift_slots),
    "stale lengths": lambda: patch.object(DecodeBuffers, "_make_arrays", _forget_the_new_token),
    "stale block tables": lambda: patch.object(DecodeBuffers, "_make_arrays", _make_no_table),
    "tokens that are not passed on": lambda: patch.object(
        decode_buffers, "pass_tokens", lambda *_: None
    ),
}
GRAPH_MISTAKES = tuple(_PATCHES)


@contextmanager
def making_graph_mistake(name: str) -> Iterator[None]:
    with _PATCHES[name]():
        yield
