"""Refuses sounds that the model would not hear to their end.

Processors cut off what is longer than their window, without a word. How long that window is stands
in no common place, so the processor is asked: if the end of a sound may change without any change
in what comes out, that end is not heard. The sounds that it is asked about are our own, so that no
client's sound decides about another's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.utils.lru import LruCache

# The end that may go unheard: less than a syllable, and more than what coders pad a sound with.
_TOLERANCE_S = 0.05
_MAX_OPTION_SETS = 64
_USUAL_WINDOW_S = 60


@dataclass(slots=True)
class _Window:
    """What is known so far of the window under one set of options, in samples."""

    heard: int = 0  # the longest sound that was heard to its end
    unheard: int | None = None  # the shortest one that was not; `None` if there was none
    is_exact: bool = False  # nothing longer is heard, apart from what is tolerated

    def excludes(self, num_samples: int) -> bool:
        """Whether it is known that so long a sound is not heard to its end."""
        return self.is_exact or (self.unheard is not None and num_samples >= self.unheard)


class Hearing:
    """Remembers how long a sound may be. Not safe to use from two threads, since the processor is
    not.
    """

    def __init__(self, processor: MultiModalProcessor) -> None:
        self._processor = processor
        self._windows: LruCache[str, _Window] = LruCache(_MAX_OPTION_SETS)  # by options

    def check(self, num_samples: int, processor_kwargs: Mapping[str, Any]) -> None:
        """Raise a `RequestError` if the end of a sound of this length would not be heard."""
        if self._processor.takes_whole_sounds:
            return
        window = self._get_window(processor_kwargs)
        num_needed = num_samples - self._num_tolerated
        if num_needed > window.heard and not window.excludes(num_needed):
            self._explore(window, num_samples, processor_kwargs)
        if num_needed <= window.heard:
            return
        limit = "this model does not hear it to its end"
        if window.is_exact:
            limit = f"this model hears {_as_seconds(window.heard, self._rate)}"
        raise RequestError(
            f"the sound is {_as_seconds(num_samples, self._rate)} long; {limit}: send it in pieces"
        )

    def _explore(
        self, window: _Window, num_samples: int, processor_kwargs: Mapping[str, Any]
    ) -> None:
        """Learn whether a sound of this length is heard, and if not, where hearing ends.

        A window is mostly one of the numbers that a processor has, and a short one. So that is
        asked first: it spares most sounds a look, and very long ones a trial at their length.
        """
        usual = _USUAL_WINDOW_S * self._rate
        candidates = sorted({c for c in self._iter_candidates() if c <= max(num_samples, usual)})
        for length in [c for c in candidates if c <= usual][-1:]:
            self._is_heard(window, length, processor_kwargs)
        known = [window.heard] if window.heard in candidates else []
        if num_samples <= window.heard or self._ends_at_one_of(known, window, processor_kwargs):
            return
        if not self._is_heard(window, num_samples, processor_kwargs):
            shorter = [c for c in reversed(candidates) if c < num_samples]
            self._ends_at_one_of(shorter, window, processor_kwargs)

    def _ends_at_one_of(
        self, lengths: Iterable[int], window: _Window, processor_kwargs: Mapping[str, Any]
    ) -> bool:
        for length in lengths:
            beyond = length + 2 * self._num_tolerated
            if self._is_heard(window, length, processor_kwargs) and not self._is_heard(
                window, beyond, processor_kwargs
            ):
                window.is_exact = True
                return True
        return False

    @property
    def _rate(self) -> int:
        return self._processor.sampling_rate or 1

    @property
    def _num_tolerated(self) -> int:
        return int(_TOLERANCE_S * self._rate)

    def _get_window(self, processor_kwargs: Mapping[str, Any]) -> _Window:
        key = repr(sorted(processor_kwargs.items()))
        window = self._windows.get(key)
        if window is None:
            window = _Window()
            self._windows.put(key, window)
        return window

    def _is_heard(
        self, window: _Window, num_samples: int, processor_kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a sound of this length is heard to its end; noted in `window`."""
        if num_samples > window.heard and not window.excludes(num_samples):
            if self._ask(num_samples, processor_kwargs):
                window.heard = num_samples
            else:
                window.unheard = num_samples
        return num_samples <= window.heard

    def _ask(self, num_samples: int, processor_kwargs: Mapping[str, Any]) -> bool:
        """Whether the last bit of a sound of this length changes anything.

        True also where the processor fails: then the item itself will fail, and say why.
        """
        num_changed = min(num_samples, self._num_tolerated)
        silence = np.zeros(num_samples, dtype=np.float32)
        loud = silence.copy()
        loud[-num_changed:] = np.random.default_rng(0).uniform(-0.5, 0.5, num_changed)
        try:
            first, second = (
                self._processor.process_item("audio", sound, processor_kwargs).kwargs
                for sound in (silence, loud)
            )
        except RequestError:
            return True
        return any(not torch.equal(first[name], second[name]) for name in first)

    def _iter_candidates(self) -> Iterator[int]:
        """Yield all numbers of the processor as samples and as seconds."""
        processor = self._processor.hf_processor
        part = getattr(processor, "feature_extractor", None)
        values = [*vars(processor).values()]
        if part is not None:
            values += vars(part).values()
            values += [p.default for p in inspect.signature(part.__call__).parameters.values()]
        for value in values:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and value > 0:
                yield int(value)
                yield int(value * self._rate)


def _as_seconds(num_samples: int, rate: int) -> str:
    return f"{num_samples / rate:.4g} s"
