"""Fixtures that every kind of test may use: tiny real models, made once per checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], str]:
    """The directory of a family's tiny random model."""
    from make_tiny_models import make_family

    return lambda family: str(make_family(family, ROOT / "build" / "tiny-models"))
