"""When an answer is right, how many words are wrong, and how sure that is."""

from __future__ import annotations

import math
import re


def normalize(text: str) -> str:
    """Return the text without case, extra blanks and its last full stop."""
    return re.sub(r"\s+", " ", text).strip().removesuffix(".").lower()


def is_right(answer: str, expected: str, *, is_text: bool = False) -> bool:
    """Return whether the answer is the expected one; case counts where a text was read."""
    if is_text:
        return answer.strip() == expected.strip()
    return normalize(answer) == normalize(expected)


def count_word_errors(answer: str, expected: str) -> tuple[int, int]:
    """Count words that were replaced, left out or added, and the words of the expected text."""
    said, heard = normalize(expected).split(), normalize(answer).split()
    row = list(range(len(heard) + 1))
    for number, word in enumerate(said, 1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(heard, 1):
            cost = min(row[place] + 1, row[place - 1] + 1, diagonal + (word != other))
            diagonal, row[place] = row[place], cost
    return row[-1], len(said)


def interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share."""
    if not total:
        return 0.0, 1.0
    z = 1.96
    share = right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    spread = z / (1 + z * z / total)
    spread *= math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - spread), min(1.0, centre + spread)
