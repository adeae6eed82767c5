"""Headers give the same sizes as the library, and files that are cut short are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sensorium.checkpoints.files import get_num_weight_bytes, read_tensors
from sensorium.types.errors import ModelError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(7, dtype=torch.bfloat16),
        "scalar": torch.zeros(()),
        "packed": torch.zeros(11, dtype=torch.int8),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_floating_point_weights_are_counted_at_the_dtype_and_others_as_stored(path: Path) -> None:
    assert get_num_weight_bytes([path], element_size=4) == (15 + 7 + 1) * 4 + 11
    assert get_num_weight_bytes([path], element_size=2) == (15 + 7 + 1) * 2 + 11
    assert get_num_weight_bytes([path, path], element_size=2) == 2 * ((15 + 7 + 1) * 2 + 11)


@pytest.mark.parametrize("num_missing", [1, 20, 80])
def test_a_file_without_its_end_is_refused_with_both_sizes(path: Path, num_missing: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-num_missing])
    sizes = f"{len(content) - num_missing} of {len(content)} bytes"
    with pytest.raises(ModelError, match=f"{path} .*cut short: it has {sizes}"):
        read_tensors(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x08", b"\x40" + bytes(7) + b'{"a": {"dty', b"\xff" * 64]
)
def test_a_file_without_a_header_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"{path} is not a safetensors file"):
        read_tensors(path)
