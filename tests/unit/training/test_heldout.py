"""Transcriptions of the test split are no part of any training recording."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest

from training import heldout
from training.card import TASKS
from training.tasks.mixture import EVALUATION


def test_sentences_that_training_has_spoken_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def find_heard(sentences: Collection[str]) -> frozenset[str]:
        asked.update(sentences)
        return frozenset(each for each in sentences if len(each) % 4)

    author = heldout.Author.__new__(heldout.Author)  # without a drawer and a speaker
    author._random = Random(0)
    monkeypatch.setattr(heldout, "find_heard", find_heard)
    monkeypatch.setattr(heldout.Author, "write", lambda _, task, sample, *__: (task, sample.speech))
    for task in heldout.TRANSCRIPTIONS:
        cases: list = list(author.make_cases(task, EVALUATION["speech"], 40))
        assert len(cases) == 40
        assert {name for name, _ in cases} == {task}
        assert all(speech in asked and len(speech) % 4 == 0 for _, speech in cases)
    assert set(heldout.TRANSCRIPTIONS) == {task for task in TASKS if task.startswith("speech")}
