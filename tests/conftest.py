"""Fixtures that every kind of test may use: tiny real models, made once per checkout."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], str]:
    """The directory of a family's tiny random model."""
    script = ROOT / "scripts" / "make_tiny_models.py"
    spec = importlib.util.spec_from_file_location("make_tiny_models", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda family: str(module.make_family(family, ROOT / "build" / "tiny-models"))
