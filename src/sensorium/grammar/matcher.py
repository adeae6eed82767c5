"""Tracks the position of one answer in its grammar. Only one thread at a time may use a matcher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Words = npt.NDArray[np.int64]  # bit i of word w is set if token 64 * w + i may come next
_MAX_REASON = 300


class Matcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    @property
    def error(self) -> str | None:
        """Return why the matcher has failed, or `None`. A failed matcher can't be used again."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().replace("<non-verbose/>", "")
        return " ".join(reason.split())[:_MAX_REASON]

    @property
    def is_complete(self) -> bool:
        """Return whether nothing but an end can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def consume(self, token_ids: Sequence[int]) -> None:
        """Continue the answer with these tokens. If they are not allowed, `error` is set."""
        self._matcher.consume_tokens(list(token_ids))

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could follow, counted from the first."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def fill_mask(self, words: Words) -> None:
        """Write into `words` which tokens may follow. Other Python threads run meanwhile."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
