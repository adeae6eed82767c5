"""Packed stand-ins: a few tensors, and a tiny model; a cache of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from training.pack import pack


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    random = np.random.default_rng(0)
    tensors = {
        "matrix": random.normal(size=(24, 40)),
        "filters": random.normal(size=(8, 3, 2, 2, 2)),
        "norm": random.normal(size=24),
        "no_rows": np.zeros((3, 4)),
        "scalar": np.array(0.1),
    }
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text('{"dtype": "float16", "text_config": {"dtype": "float16"}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def packed(checkpoint: Path, tmp_path: Path) -> Path:
    pack(checkpoint, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture(scope="session")
def packed_model(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The package of a tiny model that can be loaded."""
    destination = tmp_path_factory.mktemp("packed-model") / "packed"
    pack(Path(tiny_model("qwen2_5_omni")), destination)
    return destination


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SENSORIUM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
