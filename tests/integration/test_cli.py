"""The command says what the library says."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sensorium import SamplingParams, cli
from sensorium.cli.flags import read_media
from sensorium.types.outputs import (
    CompletionDelta,
    CompletionOutput,
    RequestDelta,
    RequestOutput,
)
from tests.parity.cases import make_image
from tests.support.engine import make_llm

PROMPTS = ["hello world", "the lazy dog"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "generate", *arguments])
    cli.main()


def test_flags_are_sampling_parameters_and_every_answer_is_printed(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tiny_model("llama")
    params = SamplingParams(
        n=2,
        temperature=0.9,
        seed=5,
        max_tokens=8,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    outputs = make_llm(directory).generate(PROMPTS, params, use_tqdm=False)
    flags = [
        *("--n=2", "--temperature=0.9", "--seed=5", "--max-tokens=8", "--min-p=0.01"),
        *("--repetition-penalty=1.2", "--presence-penalty=0.5", "--frequency-penalty=-0.5"),
        *("--max-model-len=512", "--dtype=float32", "--device=cpu"),
    ]
    run(monkeypatch, directory, *PROMPTS, *flags)
    expected = [completion.text for output in outputs for completion in output.outputs]
    assert len(set(expected)) == 4
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


def test_a_bad_value_is_reported_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="sensorium: min_p: must be a number"):
        run(monkeypatch, "/nowhere", "hello", "--min-p=2")


LOADING = ("--max-model-len=512", "--dtype=float32", "--device=cpu")


def chat(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "chat", *arguments, *LOADING])
    cli.main()


def make_file(path: Path, *, seed: int) -> str:
    make_image(60, 60, seed=seed).save(path)
    return str(path)


def test_chat_prints_the_answer_and_on_demand_its_counts(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    directory = tiny_model("llava")
    files = [make_file(tmp_path / f"{seed}.png", seed=seed) for seed in (1, 2)]
    parts = [{"type": "image", "image": make_image(60, 60, seed=seed)} for seed in (1, 2)]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [*parts, {"type": "text", "text": "what is this?"}]},
    ]
    params = SamplingParams(max_tokens=8)
    (output,) = make_llm(directory).chat(messages, params, use_tqdm=False)
    flags = [f"--image={files[0]}", "--system=be brief", f"--image={files[1]}", "--max-tokens=8"]
    chat(monkeypatch, directory, *flags, "what is this?")
    shown = capsys.readouterr()
    assert shown.out == output.outputs[0].text + "\n"
    assert "prompt tokens" not in shown.err
    steps = [line for line in shown.err.splitlines() if line.startswith(f"Loading {directory}: ")]
    assert any("loading the weights ... (" in line for line in steps)
    assert f"{directory} is ready. (" in shown.err
    chat(monkeypatch, directory, *flags, "what is this?", "--quiet")
    shown = capsys.readouterr()
    assert shown.out == output.outputs[0].text + "\n"
    assert directory not in shown.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is this?\n"))
    chat(monkeypatch, directory, *flags, "-v")  # the question comes on stdin
    shown = capsys.readouterr()
    assert shown.out == output.outputs[0].text + "\n"
    assert f"{len(output.prompt_token_ids)} prompt tokens" in shown.err
    assert "8 new tokens; length" in shown.err


def test_a_conversation_remembers_what_was_said_and_shown(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    directory = tiny_model("llava")
    file = make_file(tmp_path / "one.png", seed=1)
    lines = [
        f"/image {file}",
        "what is this?",
        "/image /nowhere.png",
        "<image>",
        "and now?",
        "/what",
        "/reset",
        "hello",
    ]
    monkeypatch.setattr("builtins.input", Lines(lines))
    monkeypatch.setattr(sys, "stdin", Terminal())
    chat(monkeypatch, directory, "--max-tokens=8", "-v")
    shown = capsys.readouterr()
    llm = make_llm(directory)
    params = SamplingParams(max_tokens=8)
    image = {"type": "image", "image": make_image(60, 60, seed=1)}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image, "what is this?"]}]
    answers = [get_text(llm, messages, params)]
    messages.append({"role": "assistant", "content": answers[0]})
    messages.append({"role": "user", "content": ["and now?"]})
    answers.append(get_text(llm, messages, params))
    answers.append(get_text(llm, [{"role": "user", "content": "hello"}], params))
    assert shown.out == "".join(f"{answer}\n" for answer in answers)
    assert "sensorium: /nowhere.png can't be read: No such file or directory" in shown.err
    assert "contains '<image>'" in shown.err
    assert shown.err.count("/reset; /quit") == 2
    assert re.search(r"[1-9]\d* of them from the prefix cache", shown.err)  # in the second round


class Lines:
    """A user who types these and then ends."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = iter(lines)

    def __call__(self, prompt: str) -> str:
        del prompt
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def get_text(llm: Any, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    (output,) = llm.chat(messages, params, use_tqdm=False)
    text: str = output.outputs[0].text
    return text


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            "chat",
            ["hello", "--image=/nowhere.png"],
            "sensorium: /nowhere.png can't be read: No such file",
        ),
        (
            "generate",
            ["hello", "--audio=/nowhere.wav"],
            "sensorium: /nowhere.wav can't be read: No such file",
        ),
        ("generate", ["a", "b", "--video=x.mp4"], "sensorium: --video goes with one prompt only"),
        ("chat", [], "sensorium: there is no question"),
        ("chat", ["hello", "world"], "2"),
        ("chat", ["hello", "--colour"], "2"),
        ("chat", ["hello", "--top-p=7"], "sensorium: top_p: must be"),
    ],
)
def test_an_error_is_reported_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    monkeypatch.setattr(sys, "argv", ["sensorium", command, "/no/model", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert str(caught.value.code).startswith(message)


def test_an_interruption_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sensorium.cli.flags.load_llm", interrupt)
    with pytest.raises(SystemExit) as caught:
        chat(monkeypatch, "/no/model", "hello")
    assert caught.value.code == 130


class InterruptedLLM:
    """Is interrupted in the middle of its first answer, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    def stream_chat(self, messages: list[dict[str, Any]], *_: Any, **__: Any) -> Any:
        self.asked.append(messages)
        completion = CompletionOutput(index=0, text="yes", token_ids=(1,), finish_reason=None)
        output = RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=(), outputs=(completion,), finished=True
        )
        delta = CompletionDelta(index=0, text="yes", token_ids=(1,))
        yield RequestDelta(request_id="r", deltas=(delta,))
        if len(self.asked) == 1:
            raise KeyboardInterrupt
        yield RequestDelta(request_id="r", deltas=(), final=output)


def test_an_interrupted_answer_is_dropped_and_the_conversation_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = InterruptedLLM()
    monkeypatch.setattr("sensorium.cli.flags.load_llm", lambda _: nullcontext(llm))
    monkeypatch.setattr("builtins.input", Lines(["one", "two", "three", "/quit", "four"]))
    monkeypatch.setattr(sys, "stdin", Terminal())
    chat(monkeypatch, "/no/model", "--system=be")
    asked = [[get_words(message) for message in messages] for messages in llm.asked]
    assert asked == [["be", "one"], ["be", "two"], ["be", "two", "yes", "three"]]
    assert "(interrupted)" in capsys.readouterr().err


def get_words(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["models"]])
def test_a_reader_who_leaves_is_no_error(words: list[str]) -> None:
    """The command is used as in `sensorium … | head`."""
    command = [sys.executable, "-c", "from sensorium.cli import main; main()", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    ours, theirs = os.pipe()
    os.close(ours)  # gone before the first word
    with os.fdopen(theirs, "wb") as pipe:
        ended = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, env=environment, timeout=240, check=False
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_urls_are_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    assert read_media(str(tmp_path / "a.bin")) == b"abc"
    for url in ("https://example.com/a.png", "http://example.com/a", "data:image/png;base64,AA"):
        assert read_media(url) is url


def test_a_file_url_is_read_only_below_the_allowed_path(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    url = "file://" + make_file(tmp_path / "one.png", seed=1)
    flags = [f"--image={url}", "--max-tokens=2"]
    with pytest.raises(SystemExit) as ended:
        chat(monkeypatch, tiny_model("llava"), *flags, "what?")
    assert "messages[0].content[0]: " in str(ended.value)
    assert "Traceback" not in capsys.readouterr().err
    chat(
        monkeypatch, tiny_model("llava"), *flags, f"--allowed-local-media-path={tmp_path}", "what?"
    )
    assert capsys.readouterr().out
