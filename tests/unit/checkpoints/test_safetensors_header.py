"""Headers give the same sizes as the library, and files that are cut short are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sensorium.checkpoints.safetensors_header import get_num_weight_bytes, read_tensors
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


WHOLE = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def lacking(key: str) -> dict[str, object]:
    return {name: value for name, value in WHOLE.items() if name != key}


@pytest.mark.parametrize(
    "header",
    [
        *(b"[" * 100_000, b'{"a":' * 100_000, b"[1]", b"null", b"{}"),
        *({"a": 5}, {"a": None}, {"__metadata__": 5}, {"__metadata__": {"a": 5}, "a": WHOLE}),
        *({"a": lacking(key)} for key in WHOLE),
        *({"a": WHOLE | {"dtype": dtype}} for dtype in (5, None, ["F32"], "F64")),
        *(
            {"a": WHOLE | {"shape": shape}}
            for shape in ("ab", ["4"], None, [-4], [4.5], [float("inf")], [2**62] * 4, [2, 3], [0])
        ),
        *(
            {"a": WHOLE | {"data_offsets": offsets}}
            for offsets in (
                *([], [0], [0, 16, 16], {"1": 2}, ["0", "16"], [0, 16.5], [-16, 0], [16, 0]),
                *([0, float("inf")], [0, float("nan")], [0, 10**30], [4, 20]),
            )
        ),
        {"a": WHOLE, "b": WHOLE},
        {"a": WHOLE, "b": WHOLE | {"data_offsets": [20, 36]}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_wrong_header_is_refused_by_us_and_by_the_library(path: Path, header: object) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(16))
    with pytest.raises(ModelError, match=f"^{path} is (not a safetensors file, or is )?damaged: "):
        read_tensors(path)
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass


def test_a_file_with_more_than_its_tensors_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ModelError, match=f"{path} is damaged: it has"):
        read_tensors(path)


def test_a_file_that_can_not_be_read_is_named(path: Path) -> None:
    path.unlink()
    with pytest.raises(ModelError, match=f"{path} can't be read: No such file"):
        read_tensors(path)
