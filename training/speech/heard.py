"""Finds test sentences that training may have said inside longer ones.

The weights that ship were trained with long sentences that were joined from any, also from those
kept for the test (ADR 20). And a short one may stand in a longer one at any time.
"""

from __future__ import annotations

import random as random_module
from collections import defaultdict
from collections.abc import Collection

from tqdm import tqdm

from training.speech.sentences import LONG_SHARE, MAX_WORDS, is_test_sentence, make_any_sentence

NUM_SAID = 1_700_000  # about fifteen times what the two runs said to be transcribed


def find_heard(
    sentences: Collection[str], *, num_said: int = NUM_SAID, seed: int = 0
) -> frozenset[str]:
    """Return the sentences that occur, word by word, in simulated training sentences."""
    lengths: dict[str, set[int]] = defaultdict(set)
    for sentence in sentences:
        words = sentence.split(" ")
        lengths[words[0]].add(len(words))
    wanted, heard = frozenset(sentences), set()
    random = random_module.Random(seed)
    for _ in tqdm(range(num_said), desc="what training has said", mininterval=5.0):
        words = _say(random)
        for start, word in enumerate(words):
            for length in lengths.get(word, ()):
                part = " ".join(words[start : start + length])
                if part in wanted:
                    heard.add(part)
    return frozenset(heard)


def _say(random: random_module.Random) -> list[str]:
    """Return the words of a training sentence, chosen as they were for the weights that ship."""
    if random.random() < LONG_SHARE:
        num_words = random.randint(11, MAX_WORDS)
        words: list[str] = []
        while len(words) < num_words:
            words += make_any_sentence(random).split(" ")
        return words[:num_words]
    while True:
        sentence = make_any_sentence(random)
        if not is_test_sentence(sentence):
            return sentence.split(" ")
