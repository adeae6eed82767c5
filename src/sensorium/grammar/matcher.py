"""Where one answer stands in its grammar. Not for two threads at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Words = npt.NDArray[np.int64]  # bit i of word w: token 64 * w + i may come next
_MAX_REASON = 300


class Matcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    @property
    def error(self) -> str | None:
        """Why it can't go on; then it never will."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().replace("<non-verbose/>", "")
        return " ".join(reason.split())[:_MAX_REASON]

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but an end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """The answer may end here."""
        return bool(self._matcher.is_accepting())

    def consume(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these tokens; `error` if it may not."""
        self._matcher.consume_tokens(list(token_ids))

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens could follow."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def fill_mask(self, words: Words) -> None:
        """Write which tokens may follow. The interpreter is not locked meanwhile."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
