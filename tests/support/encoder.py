"""Runs remote encoders in this process, over a real socket."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.engine.assembly.encoder import Encoder, build_encoder
from sensorium.engine.assembly.options import EncodeOptions, LoadingOptions, MediaOptions
from sensorium.engine.encoding.listener import EncoderListener
from sensorium.engine.encoding.service import EncoderCounts


@dataclass(frozen=True, slots=True, eq=False)
class EncoderHere:
    """An encoder in this process, and the address at which engines find it."""

    encoder: Encoder
    listener: EncoderListener
    address: str

    def get_counts(self) -> EncoderCounts:
        return self.encoder.service.get_counts()


@contextmanager
def encoding_here(model: str, **options: Any) -> Iterator[EncoderHere]:
    """Run an encoder in this process, behind a real socket in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "encoder.sock")
        with encoding_at(path, model, **options) as encoder:
            yield encoder


@contextmanager
def encoding_at(
    path: str,
    model: str,
    *,
    max_items: int = 64,
    dtype: str = "float32",
    device: str = "auto",
    **media: Any,
) -> Iterator[EncoderHere]:
    """Run an encoder in this process that listens at a path."""
    encoder = build_encoder(
        LoadingOptions(model=model, dtype=dtype, device=device),
        options=EncodeOptions(socket=path, max_items=max_items),
        media=MediaOptions(**media),
    )
    try:
        listener = EncoderListener(path, encoder.service, encoder.identity, max_connections=64)
        try:
            yield EncoderHere(encoder, listener, f"unix:{path}")
        finally:
            listener.close(30)
    finally:
        encoder.close()
