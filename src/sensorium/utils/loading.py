"""What a process does while it loads what it will have for as long as it lives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection inside, and none later of what is there at the end.

    Importing torch and Transformers makes so many objects that the collector looks at all of them
    again and again, for a seventh of the time; later a full collection would stop the process for
    a quarter of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
