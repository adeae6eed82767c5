"""What the demo shows, without a server."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sensorium.cli import demo
from sensorium.cli.demo import Screen, describe_trace, show_samples
from sensorium.cli.demo_server import (
    Answer,
    DemoClient,
    DemoFailedError,
    DemoRefusedError,
    DemoServer,
)
from sensorium.embedded.samples import DEMO_SAMPLES, MEDIA_FOLDER, SampleMedia

ROOT = Path(__file__).parents[3]


def test_samples_are_there_and_small() -> None:
    names = {name for sample in DEMO_SAMPLES for name in sample.files}
    assert {path.name for path in MEDIA_FOLDER.iterdir()} == names
    assert sum(path.stat().st_size for path in MEDIA_FOLDER.iterdir()) < 300_000
    modalities = {item.modality for sample in DEMO_SAMPLES for item in sample.media}
    assert modalities == {"image", "audio", "video"}


def make_screen(monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    screen = Screen()
    options = {"force_terminal": True, "color_system": "truecolor", "width": 80, **options}
    console = Console(file=file, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(screen, "_console", console)
    return screen, file


def test_media_is_drawn_in_its_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, file = make_screen(monkeypatch)
    for sample in DEMO_SAMPLES:
        for item in sample.media:
            screen.show_media(item)
    drawn = file.getvalue()
    assert "38;2;230;26;31;48;2;230;26;31m▀" in drawn  # inside the red circle
    assert "█" in drawn  # the loudest moment of the audio


@pytest.mark.parametrize(
    "options",
    [{"force_terminal": False}, {"no_color": True}, {"width": 60}, {"color_system": None}],
)
def test_nothing_is_drawn_where_it_could_not_be_seen(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    screen, file = make_screen(monkeypatch, **options)
    screen.show_media(DEMO_SAMPLES[0].media[0])
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("variables", "has_color", "shown"),
    [
        ({}, True, "\x1b[36mblue\x1b[0m\n"),
        ({"NO_COLOR": "1"}, True, "blue\n"),
        ({"TERM": "dumb"}, True, "blue\n"),
        ({}, False, "blue\n"),
    ],
)
def test_color_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    has_color: bool,
    shown: str,
) -> None:
    for name in ("NO_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if this were a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Screen(has_color=has_color).say("blue", "cyan")
    assert capsys.readouterr().out == shown


def test_pieces_of_an_answer_stay_in_their_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del monkeypatch
    screen = Screen()
    for piece in ("A ", "[red]", " circle", "."):
        screen.write(piece)
    assert capsys.readouterr().out == "A [red] circle."


def test_the_trace_is_printed_in_words() -> None:
    item = {"modality": "image", "processor": "miss", "encoder": "miss", "ms": {"decode": 2.4}}
    trace = {"items": [item], "ms": {"encode": 30.2}, "num_prompt_tokens": 80}
    assert describe_trace({**trace, "num_cached_tokens": 0}) == (
        "image decoded in 2 ms, encoded; encoding took 30 ms; "
        "0 of 80 prompt tokens from the prefix cache"
    )
    hit = {"modality": "image", "processor": "hit", "encoder": "skipped", "ms": {}}
    assert describe_trace({**trace, "items": [hit], "ms": {}, "num_cached_tokens": 72}) == (
        "image from the processor cache, no encoding needed; "
        "72 of 80 prompt tokens from the prefix cache"
    )


class PartialClient:
    """A client of a model that takes some media only."""

    def __init__(self, *modalities: str) -> None:
        self.modalities = modalities

    def ask(
        self, media: Sequence[SampleMedia], question: str, *, on_text: Callable[[str], None]
    ) -> Answer:
        for item in media:
            if item.modality not in self.modalities:
                raise DemoRefusedError(f"this model takes no {item.modality}")
        on_text(f"Yes: {question}")
        trace = {"items": [], "ms": {}, "num_prompt_tokens": 9, "num_cached_tokens": 0}
        return Answer(text="Yes.", seconds=0.5, trace=trace)


def test_what_a_model_does_not_take_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    client: Any = PartialClient("image", "video")
    show_samples(Screen(), client)
    first, again = capsys.readouterr().out.split("Again:")
    assert first.count("left out: this model takes no audio") == 2
    assert "a video  " in again  # in the table
    assert "spoken" not in again


def test_a_model_that_takes_nothing_is_an_error() -> None:
    client: Any = PartialClient()
    with pytest.raises(DemoRefusedError, match="takes no"):
        show_samples(Screen(), client)


@pytest.mark.processes
def test_the_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "import signal, sensorium.cli; sensorium.cli.main = signal.pause\n"
        "from sensorium.cli.demo_server import serve_while_wanted; serve_while_wanted()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.processes
def test_the_error_of_a_server_that_can_not_start_is_printed() -> None:
    with (
        DemoServer("") as server,
        pytest.raises(DemoFailedError, match="the name of the model is empty"),
    ):
        server.wait_until_ready()


def test_a_server_that_does_not_answer_is_named() -> None:
    with DemoClient("http://127.0.0.1:9") as client, pytest.raises(DemoFailedError) as caught:
        client.ask((), "hello", on_text=print)
    assert str(caught.value).startswith("the server does not answer: ")


def test_a_pipe_that_breaks_ends_the_demo_like_other_commands() -> None:
    with pytest.raises(BrokenPipeError):
        demo._Console().on_broken_pipe()
