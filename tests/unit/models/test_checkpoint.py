"""A checkpoint's files are found, or it is said in one sentence which are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import errors

from sensorium.checkpoints.files import read_json
from sensorium.models import checkpoint
from sensorium.models.checkpoint import find_checkpoint, find_weights
from sensorium.types.errors import ModelError


def find(model: str, revision: str | None = None) -> Path:
    return find_checkpoint(model, revision=revision, trust_remote_code=False, use_tqdm=False)


def write_index(directory: Path, *names: str) -> None:
    weight_map = {f"tensor-{index}": name for index, name in enumerate(names)}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_directory_is_its_own_checkpoint(tmp_path: Path) -> None:
    assert find(str(tmp_path)) == tmp_path


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"revision='v1' needs a hub id, but .* is a directory"):
        find(str(tmp_path), revision="v1")


def test_no_name_is_not_the_current_directory() -> None:
    with pytest.raises(ModelError, match="the name of the model is empty"):
        find("")


@pytest.mark.parametrize("model", ["/no/such/place", "./nowhere", "~/nowhere", "a/b/c"])
def test_what_can_only_be_a_path_is_not_looked_up_on_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_fetch", None)
    with pytest.raises(ModelError, match=f"there is no directory '{model}'"):
        find(model)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.HFValidationError("long"), "'owner/name' is neither a directory nor a hub id"),
        (errors.LocalEntryNotFoundError("long"), "nor in the hub's cache, and the hub can't be"),
        (OSError("disk full\nand more"), "'owner/name' can't be fetched: disk full$"),
        (TimeoutError(), "'owner/name' can't be fetched: TimeoutError$"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint.huggingface_hub, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(checkpoint.huggingface_hub, "is_offline_mode", lambda: False)
    with pytest.raises(ModelError, match=message) as caught:
        find("owner/name")
    assert "\n" not in str(caught.value)


def test_code_is_fetched_only_if_it_may_run_and_weights_by_their_names_from_the_same_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []
    snapshot = tmp_path / "0123abc"
    snapshot.mkdir()
    write_index(snapshot, "a.safetensors", "b.safetensors")
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (snapshot / "config.json").write_text(json.dumps(settings))
    (snapshot / "tokenizer.json").touch()

    def download(model: str, **options: object) -> str:
        calls.append((model, options["revision"], options["allow_patterns"]))
        if options["revision"] == snapshot.name:
            for name in ("a.safetensors", "b.safetensors"):
                (snapshot / name).touch()
        return str(snapshot)

    monkeypatch.setattr(checkpoint.huggingface_hub, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", download)
    for trust in (False, True):
        directory = find_checkpoint(
            "owner/name", revision="v1", trust_remote_code=trust, use_tqdm=False
        )
    assert [len(find_weights("owner/name", directory, use_tqdm=False)) for _ in range(2)] == [2, 2]
    assert [call[:2] for call in calls] == [
        ("owner/name", "v1"),
        ("owner/name", "v1"),
        ("owner/name", "0123abc"),
    ]
    assert ["*.py" in call[2] for call in calls] == [False, True, False]
    assert not any("*.safetensors" in call[2] for call in calls)
    assert calls[2][2] == ["a.safetensors", "b.safetensors"]


def test_weights_are_one_file_or_those_of_the_index(tmp_path: Path) -> None:
    write_index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    model = str(tmp_path)
    assert [path.name for path in find_weights(model, tmp_path, use_tqdm=False)] == [
        "a.safetensors",
        "b.safetensors",
    ]
    (tmp_path / "model.safetensors").touch()
    assert find_weights(model, tmp_path, use_tqdm=False) == (tmp_path / "model.safetensors",)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, "a.safetensors", "b.safetensors", "c.safetensors")
    (tmp_path / "b.safetensors").touch()
    with pytest.raises(ModelError, match=r"2 of 3 files are missing, for example a.safetensors"):
        find_weights(str(tmp_path), tmp_path, use_tqdm=False)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_invalid_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        ModelError, match=r"index.json is not (an index of weights|JSON|a JSON object)"
    ):
        find_weights(str(tmp_path), tmp_path, use_tqdm=False)


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no weights in .* model.safetensors or .* is needed"):
        find_weights(str(tmp_path), tmp_path, use_tqdm=False)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model.bin: only safetensors .* run code"):
        find_weights(str(tmp_path), tmp_path, use_tqdm=False)


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) == {}
    for content, message in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        path.write_text(content)
        with pytest.raises(ModelError, match=message):
            read_json(path)
