"""Which words of a command line are the model, and which are its prompt."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from sensorium import cli
from sensorium.cli.flags import hint_at_question, split_prompts, split_question

MINI = "sensorium-mini"


@pytest.mark.parametrize(
    ("words", "model", "question"),
    [
        ([], MINI, None),
        (["What is this?"], MINI, "What is this?"),
        (["Why?"], MINI, "Why?"),
        (["这是什么"], MINI, "这是什么"),
        (["Hello"], "Hello", None),
        (["owner/name"], "owner/name", None),
        (["modelle/größe"], "modelle/größe", None),
        ([MINI], MINI, None),
        (["/a path/with spaces"], "/a path/with spaces", None),
        (["owner/name", "What is this?"], "owner/name", "What is this?"),
        (["What is this?", "really"], "What is this?", "really"),
    ],
)
def test_one_word_is_a_question_if_it_can_be_no_model(
    words: list[str], model: str, question: str | None
) -> None:
    assert split_question(words) == (model, question, [])


def test_a_model_given_by_its_flag_takes_no_word() -> None:
    assert split_question([], "owner/name") == ("owner/name", None, [])
    assert split_question(["Hello"], "owner/name") == ("owner/name", "Hello", [])
    assert split_question(["Hello", "you"], "owner/name") == ("owner/name", "Hello", ["you"])
    assert split_prompts(["a", "b"], "owner/name") == ("owner/name", ["a", "b"])


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_the_commands_have_the_flag(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", command, "Hello", "--model", "/nothing/here"])
    with pytest.raises(SystemExit, match=r"no directory '/nothing/here': give a dir[^.]*$"):
        cli.main()


def test_a_word_that_was_taken_for_a_model_may_have_been_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for words in ([], [MINI], ["owner/name"], ["model"], ["Hello", "you"]):
        assert hint_at_question(words) == ""
    monkeypatch.setattr(sys, "argv", ["sensorium", "chat", "Hello"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit, match=r"no question.*\. A single word .* sensorium-mini Hello$"):
        cli.main()


def test_a_directory_is_a_model_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_question(["my model"]) == ("my model", None, [])
    assert split_prompts(["my model"]) == ("my model", [])


@pytest.mark.parametrize(
    ("words", "model", "prompts"),
    [
        ([], MINI, []),
        ([MINI], MINI, []),
        (["hello"], MINI, ["hello"]),
        (["owner/name", "a", "b"], "owner/name", ["a", "b"]),
    ],
)
def test_one_word_is_a_prompt(words: list[str], model: str, prompts: list[str]) -> None:
    assert split_prompts(words) == (model, prompts)


@pytest.mark.parametrize(
    "order",
    [
        ["owner/name", "What?", "--top-k=3"],
        ["owner/name", "--top-k=3", "What?"],
        ["--top-k=3", "owner/name", "What?"],
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_words_may_stand_on_both_sides_of_flags(
    monkeypatch: pytest.MonkeyPatch, command: str, order: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", command, *order])
    assert cli._parse_arguments().words == ["owner/name", "What?"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["chat", "m", "what?", "else"], "unrecognized arguments: else"),
        (["chat", "m", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["models", "m", "n"], "unrecognized arguments: n"),
        (["generate"], "there is no prompt"),
        (["transcribe"], "there is no file"),
    ],
)
def test_words_that_mean_nothing_are_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["serve", "render", "chat", "generate", "transcribe", "demo", "models"]
)
def test_help_names_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert MINI in capsys.readouterr().out


def test_stdin_may_be_named_behind_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "transcribe", "a.wav", "--format=srt", "-"])
    assert cli._parse_arguments().words == ["a.wav", "-"]
