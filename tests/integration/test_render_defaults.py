"""A server without a model resolves the same defaults as a core with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sensorium.models.generation_config import get_generation_defaults, load_generation_defaults
from sensorium.models.loading import load_config, load_model
from sensorium.types.sampling import GenerationDefaults
from tests.parity.cases import FAMILIES


def get_own_defaults(directory: str, generation_config: str = "auto") -> GenerationDefaults:
    """Of the model itself."""
    config = load_config(directory)
    hf_model = load_model(directory, config, dtype=torch.float32, device=torch.device("cpu"))
    return get_generation_defaults(hf_model.model, generation_config)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_without_a_model_are_those_with_it(
    tiny_model: Callable[[str], str], family: str
) -> None:
    directory = tiny_model(family)
    assert load_generation_defaults(directory) == get_own_defaults(directory)


@pytest.mark.parametrize("generation_config", ["auto", "none"])
@pytest.mark.parametrize(
    "content", [None, {"do_sample": True, "temperature": 0.3, "top_k": 7, "eos_token_id": [3, 5]}]
)
def test_defaults_equal_the_models_with_and_without_a_generation_config(
    tiny_model: Callable[[str], str],
    tmp_path: Path,
    content: dict[str, object] | None,
    generation_config: str,
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = directory / "generation_config.json"
    path.unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 4}))
    if content is not None:
        path.write_text(json.dumps(content))
    defaults = load_generation_defaults(str(directory), generation_config)
    assert defaults == get_own_defaults(str(directory), generation_config)
    assert defaults.eos_token_ids == ((4,) if content is None else (3, 5))
