"""Kept tokens of `generate` never stand in for another model, version or question."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.parity import kept_tokens
from tests.parity.cases import FAMILIES
from tests.parity.kept_tokens import (
    FOLDER,
    KeptTokens,
    digest_model,
    digest_question,
    is_checked,
)

# Digests that this commit would not draw, and one that it would.
NAMES = [f"{number:020x}" for number in range(200)]
UNCHECKED, OTHER = [name for name in NAMES if not is_checked(name)][:2]
CHECKED = next(name for name in NAMES if is_checked(name))


def fail() -> NoReturn:
    raise AssertionError("`generate` was asked")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def open_file(tmp_path: Path, model: Path) -> Callable[..., KeptTokens]:
    """The kept tokens of a family; [1, 2] for two questions."""

    def open_it(mode: str = "kept") -> KeptTokens:
        digest_model.cache_clear()
        return KeptTokens("family", str(model), mode=mode, folder=tmp_path / "references")

    written = open_it("write")
    for name in (UNCHECKED, CHECKED):
        written.get(name, lambda: [1, 2])
    written.write()
    return open_it


def test_kept_tokens_are_not_computed(open_file: Callable[..., KeptTokens]) -> None:
    assert open_file().get(UNCHECKED, fail) == [1, 2]


@pytest.mark.parametrize(("mode", "digest"), [("kept", CHECKED), ("fresh", UNCHECKED)])
def test_tokens_that_have_changed_are_an_error(
    open_file: Callable[..., KeptTokens], mode: str, digest: str
) -> None:
    assert open_file(mode).get(digest, lambda: [1, 2]) == [1, 2]
    with pytest.raises(AssertionError, match=r"is kept as \[1, 2\], but `generate` gives \[1, 3\]"):
        open_file(mode).get(digest, lambda: [1, 3])


def test_a_question_that_is_not_kept_is_computed_once(open_file: Callable[..., KeptTokens]) -> None:
    kept = open_file()
    assert kept.get(OTHER, lambda: [4]) == [4]
    assert kept.get(OTHER, fail) == [4]
    assert open_file().get(OTHER, lambda: [5]) == [5]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_model_has_nothing_kept(
    open_file: Callable[..., KeptTokens], model: Path, name: str
) -> None:
    (model / name).write_bytes(b"changed")
    assert open_file().get(UNCHECKED, lambda: [9]) == [9]


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_version_has_nothing_kept(
    open_file: Callable[..., KeptTokens], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    # Transformers replaces its own module while it is imported: patch the one that is read.
    monkeypatch.setattr(getattr(kept_tokens, library), "__version__", "0.0")
    assert open_file().get(UNCHECKED, lambda: [9]) == [9]


def test_files_written_by_several_processes_are_joined(
    open_file: Callable[..., KeptTokens],
) -> None:
    first, second = open_file("write"), open_file("write")
    first.get(OTHER, lambda: [4])
    second.get(UNCHECKED, lambda: [7])
    first.write()
    second.write()
    joined = open_file()
    assert [joined.get(name, fail) for name in (OTHER, UNCHECKED)] == [[4], [7]]


def test_questions_differ_by_all_that_generate_is_given(model: Path) -> None:
    inputs = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": torch.zeros(2, 3)}
    options = {"ignore_eos": True, "max_new_tokens": 12}
    changes: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (inputs, options),
        ({**inputs, "input_ids": torch.tensor([[1, 3]])}, options),
        ({**inputs, "pixel_values": torch.zeros(3, 2)}, options),
        ({**inputs, "pixel_values": torch.zeros(2, 3, dtype=torch.int32)}, options),
        ({"input_ids": inputs["input_ids"]}, options),
        (inputs, {**options, "max_new_tokens": 13}),
        (inputs, {**options, "ignore_eos": False}),
    ]
    digests = {digest_question(model, *change) for change in changes}
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    digests.add(digest_question(model, inputs, options))
    assert len(digests) == len(changes) + 1


def test_every_commit_checks_about_a_tenth_and_another_one() -> None:
    drawn = [{name for name in NAMES if is_checked(name, commit)} for commit in ("a", "b")]
    assert all(8 <= len(names) <= 36 for names in drawn)
    assert drawn[0] != drawn[1]
    assert drawn[0] == {name for name in NAMES if is_checked(name, "a")}


def test_the_files_of_this_machine_have_a_question_for_every_family() -> None:
    if not FOLDER.exists():
        pytest.skip("no references were written on a machine of this type")
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FAMILIES)
    for path in FOLDER.glob("*.json"):
        assert len(json.loads(path.read_text())["tokens"]) >= 8
