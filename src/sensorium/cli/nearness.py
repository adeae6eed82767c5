"""Finds the flag that may be meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_LEAST_LIKENESS = 0.75  # of two words that may be the same one
_LEAST_NEARNESS = 0.75  # of two flags: the share of words that they have in common
_LEAST_RATIO = 0.87  # of two flags, letter by letter


def hint_at_flag(word: str, flags: Sequence[str]) -> str:
    """Return a hint for an error message that names the one of `flags` that `word` may stand for.

    Returns an empty text unless a flag is near: most of its words are those of the other, or all of
    at least two words of `word` are in it.
    """
    given = word.partition("=")[0].replace("_", "-")
    if not given.startswith("--"):
        return ""
    if "." in given and given.partition(".")[0] in flags:  # vLLM's form of a JSON object
        return f" (write {given.partition('.')[0]} with a JSON object)"
    ranked = [(_compare_flags(given, flag), flag) for flag in flags if flag.startswith("--")]
    best, nearest = max(ranked, default=(0.0, ""))
    return f" (did you mean {nearest}?)" if best >= _LEAST_NEARNESS else ""


def _compare_flags(given: str, flag: str) -> float:
    """Return how near a flag is to what was given, from 0 to 1."""
    words, known = given[2:].split("-"), flag[2:].split("-")
    matches = sum(
        bool(difflib.get_close_matches(word, known, 1, _LEAST_LIKENESS)) for word in words
    )
    share = 2 * matches / (len(words) + len(known))
    if matches == len(words) >= 2:
        share = max(share, _LEAST_NEARNESS)
    whole = difflib.SequenceMatcher(None, given, flag).ratio()
    return max(share, whole if whole >= _LEAST_RATIO else 0)
