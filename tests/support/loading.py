"""A loader of media that waits for hosts and disks in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from sensorium.multimodal.fetching.loader import MediaLoader, MediaSource
from sensorium.multimodal.media import LoadedMedia, MediaBytes
from sensorium.types.errors import RequestError
from sensorium.utils.pausing import run_through


class BlockingLoader(MediaLoader):
    """A `MediaLoader` with methods that return when everything is loaded."""

    def load_all(
        self, items: Sequence[tuple[MediaSource, str]], *, cancelled: Future[None] | None = None
    ) -> list[LoadedMedia]:
        return run_through(self.load_pausing(items, cancelled=cancelled))

    def load(
        self, source: MediaSource, modality: str, *, cancelled: Future[None] | None = None
    ) -> MediaBytes:
        """Return the bytes of one item, or raise what is wrong with it."""
        (loaded,) = self.load_all([(source, modality)], cancelled=cancelled)
        if isinstance(loaded.outcome, RequestError):
            raise loaded.outcome
        return loaded.outcome
