"""What is packed comes back: rows within half a step, all else bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sensorium.embedded.cache import find_embedded_model, read_manifest
from training import pack as packing
from training.pack import make_shards, pack, quantize_rows

pytestmark = pytest.mark.usefixtures("cache")


def test_tensors_come_back_in_float32_and_their_shapes(checkpoint: Path, packed: Path) -> None:
    before = load_file(checkpoint / "model.safetensors")
    after = load_file(find_embedded_model(packed) / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name].shape, after[name].dtype) == (tensor.shape, np.float32)
        rows = tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(1, -1)
        half_step = np.abs(rows).max(axis=1) / 254 if tensor.ndim > 1 else 0.0
        difference = np.abs(rows - after[name].reshape(rows.shape)).max(axis=1)
        assert (difference <= half_step * 1.001).all(), name


def test_matrices_take_one_byte_a_weight(packed: Path) -> None:
    stored = load_file(packed / "packed-00001.safetensors")
    assert {stored[name].dtype.name for name in ("matrix", "filters", "no_rows")} == {"int8"}
    assert {stored[name].dtype.name for name in ("norm", "scalar")} == {"float32"}
    assert stored["filters.int8_scale"].shape == (8,)


def test_all_packed_files_have_the_same_permissions(packed: Path) -> None:
    assert len({path.stat().st_mode for path in packed.iterdir()}) == 1


def test_every_file_is_in_the_manifest(packed: Path) -> None:
    manifest = read_manifest(packed)
    names = {path.name for path in packed.iterdir()}
    assert names == manifest.packed.keys() | {"manifest.json"}
    for name, digest in manifest.packed.items():
        assert hashlib.sha256((packed / name).read_bytes()).hexdigest() == digest


def test_small_files_stay_and_the_config_says_float32(checkpoint: Path, packed: Path) -> None:
    expanded = find_embedded_model(packed)
    config = json.loads((expanded / "config.json").read_text())
    assert config == {"dtype": "float32", "text_config": {"dtype": "float32"}}
    template = (checkpoint / "chat_template.jinja").read_bytes()
    assert (expanded / "chat_template.jinja").read_bytes() == template


def test_packing_again_gives_the_same_bytes(checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    pack(checkpoint, tmp_path / "other")
    pack(checkpoint, tmp_path / "other")  # replaces what is there
    assert read_manifest(tmp_path / "other") == read_manifest(packed)


def test_large_models_are_cut_into_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_SHARD_BYTES", 100)
    tensors = {str(index): np.zeros(40, np.int8) for index in range(5)}
    shards = list(make_shards({**tensors, "9": np.zeros(200, np.int8)}))
    assert [len(shard) for shard in shards] == [2, 2, 1, 1]


def test_a_model_that_can_not_be_packed_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="more than the 1000 that may be shipped"):
        pack(checkpoint, tmp_path / "packed", max_bytes=1000)
    assert not (tmp_path / "packed").exists()
    with pytest.raises(SystemExit, match="no packed checkpoint: it is not replaced"):
        pack(checkpoint, checkpoint)
    assert (checkpoint / "model.safetensors").is_file()
    with pytest.raises(SystemExit, match="no safetensors files"):
        pack(tmp_path, tmp_path / "packed")
    with pytest.raises(SystemExit, match="no numbers"):
        quantize_rows(np.array([[1.0, np.nan]], np.float32))
