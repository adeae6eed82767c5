"""Reference models, loaded once and asked once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.parity.reference import Reference, ReferenceOf


@pytest.fixture(scope="session")
def reference_of(tiny_model: Callable[[str], str]) -> ReferenceOf:
    """The reference of a family, with the expected tokens of all its cases."""
    return cache(lambda family: Reference(tiny_model(family), family))
