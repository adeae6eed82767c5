"""Engines that a whole session shares: a test that leaves something behind disturbs the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.integration.neighbours import OPTIONS, Neighbours, make_good_prompts
from tests.parity.driver import make_llm


@pytest.fixture(scope="session")
def neighbours_of(tiny_model: Callable[[str], str]) -> Callable[[str], Neighbours]:
    """An engine of the family with good prompts for it."""

    @cache
    def make(family: str) -> Neighbours:
        llm = make_llm(tiny_model(family), **OPTIONS)
        return Neighbours(llm, make_good_prompts(family))

    return make
