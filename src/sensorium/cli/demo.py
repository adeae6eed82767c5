"""The session of `sensorium demo`, which asks about samples twice to show what caches save.

A `Screen` writes plain text, and draws media with characters if the terminal can show colors. The
command line imports this module only to run the command, because the import takes long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sensorium.cli.demo_server import Answer, DemoClient, DemoRefusedError, DemoServer
from sensorium.embedded.samples import DEMO_SAMPLES, DemoSample, SampleMedia
from sensorium.utils.printable import make_printable

_INDENT = "  "
_PICTURE_SIDE = 32
_FRAME_SIDE = 20
_NUM_FRAMES = 3
_MIN_WIDTH = len(_INDENT) + _NUM_FRAMES * (_FRAME_SIDE + 2)
_BARS = " ▁▂▃▄▅▆▇█"
_NUM_BARS = 60
_UPPER_HALF = "▀"
_STAGES = {"decode": "decoded", "process": "processed"}


def run_demo(arguments: argparse.Namespace) -> None:
    screen = Screen(has_color=not arguments.no_color)
    screen.say(f"Starting a server with {arguments.model} ...")
    start = time.perf_counter()
    with DemoServer(arguments.model) as server:
        url = server.wait_until_ready()
        screen.say(f"{url} is ready after {time.perf_counter() - start:.1f} s.")
        with DemoClient(url) as client:
            client.connect()
            show_samples(screen, client)


def show_samples(screen: Screen, client: DemoClient) -> None:
    """Ask two different questions about each sample, and show how much time caches save."""
    screen.say()
    screen.say("First: nothing of this was sent before.", "bold")
    first = _ask_all(screen, client, DEMO_SAMPLES, 0)
    screen.say()
    screen.say("Again: the same media, other questions.", "bold")
    again = _ask_all(screen, client, first, 1)
    screen.say()
    screen.show_times([(sample.title, first[sample], again[sample]) for sample in again])


def _ask_all(
    screen: Screen, client: DemoClient, samples: Iterable[DemoSample], number: int
) -> dict[DemoSample, Answer]:
    """Ask question `number` (0 or 1) about each sample, and return the answers.

    A sample that the server refuses is reported and left out. If it refuses all samples, the last
    `DemoRefusedError` is raised.
    """
    answers: dict[DemoSample, Answer] = {}
    refused: DemoRefusedError | None = None
    for sample in samples:
        try:
            answers[sample] = _ask(screen, client, sample, number)
        except DemoRefusedError as error:
            screen.say(f"  left out: {error}", "yellow")
            refused = error
    if refused is not None and not answers:
        raise refused
    return answers


def _ask(screen: Screen, client: DemoClient, sample: DemoSample, number: int) -> Answer:
    screen.say()
    screen.say(f"{sample.title} ({', '.join(sample.files)})", "cyan")
    if number == 0:
        for item in sample.media:
            screen.show_media(item)
    screen.say(f"> {sample.questions[number] or '(what is said)'}", "green")
    answer = client.ask(sample.media, sample.questions[number], on_text=screen.write)
    screen.say()
    screen.say(f"  {answer.seconds:.3f} s: {describe_trace(answer.trace)}", "dim")
    return answer


def describe_trace(trace: dict[str, Any]) -> str:
    """Return a description of a request's media and cache hits, from its `sensorium_trace`."""
    parts = [f"{item['modality']} {_describe_item(item)}" for item in trace["items"]]
    if "encode" in trace["ms"]:
        parts.append(f"encoding took {trace['ms']['encode']:.0f} ms")
    num_tokens, num_cached = trace["num_prompt_tokens"], trace["num_cached_tokens"]
    parts.append(f"{num_cached} of {num_tokens} prompt tokens from the prefix cache")
    return "; ".join(parts)


def _describe_item(item: dict[str, Any]) -> str:
    words = {"hit": "embeddings from the encoder cache", "miss": "encoded"}
    encoder = words.get(item["encoder"], "no encoding needed")
    if item["processor"] == "hit":
        return f"from the processor cache, {encoder}"
    times = [
        f"{word} in {item['ms'][stage]:.0f} ms"
        for stage, word in _STAGES.items()
        if stage in item["ms"]
    ]
    return ", ".join([*times, encoder])


class _Console(Console):
    """A rich console that raises `BrokenPipeError`; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Screen:
    """A terminal screen of the demo, which writes text and draws media with characters."""

    def __init__(self, *, has_color: bool = True) -> None:
        # rich finds out which colors there are, and obeys NO_COLOR. Without a color system there is
        # no style at all.
        self._console = _Console(color_system="auto" if has_color else None, highlight=False)

    @property
    def can_draw(self) -> bool:
        """Return whether the terminal has colors, UTF-8 and enough columns to draw media."""
        console = self._console
        has_color = console.is_terminal and console.color_system and not console.no_color
        return bool(has_color) and console.width >= _MIN_WIDTH and console.encoding == "utf-8"

    def say(self, text: str = "", style: str = "") -> None:
        """Write a line of text, in a style of the rich library such as "bold"."""
        self._console.print(Text(make_printable(text), style), soft_wrap=True)

    def write(self, text: str) -> None:
        """Write a piece of an answer, without a line break at its end."""
        self._console.print(Text(make_printable(text), end=""), end="", soft_wrap=True)

    def show_media(self, item: SampleMedia) -> None:
        """Draw a media item with colored characters. Do nothing if the terminal can't show it."""
        if not self.can_draw:
            return
        for line in _draw(item):
            self._console.print(Text(_INDENT) + line, no_wrap=True)

    def show_times(self, rows: Sequence[tuple[str, Answer, Answer]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("first", "again", "saved"):
            table.add_column(name, justify="right")
        for title, first, again in rows:
            saved = first.seconds - again.seconds
            times = (f"{value:.3f} s" for value in (first.seconds, again.seconds, saved))
            table.add_row(title, *times)
        self._console.print(table)


def _draw(item: SampleMedia) -> list[Text]:
    if item.modality == "audio":
        return [_draw_audio(item)]
    if item.modality == "image":
        with Image.open(item.path) as image:
            return draw_pictures([image.convert("RGB")], _PICTURE_SIDE)
    return draw_pictures(_read_frames(item), _FRAME_SIDE)


def draw_pictures(images: Sequence[Image.Image], side: int) -> list[Text]:
    """Return lines of colored text that show pictures in a row, resized to `side` x `side` pixels.

    Each character shows two pixels, one above the other. `side` must be even.
    """
    size = (side, side)
    pixels = [np.asarray(image.resize(size, Image.Resampling.BOX)) for image in images]
    lines = []
    for row in range(0, side, 2):
        line = Text()
        for picture in pixels:
            for upper, lower in zip(picture[row], picture[row + 1], strict=True):
                line.append(
                    _UPPER_HALF, Style(color=_make_color(upper), bgcolor=_make_color(lower))
                )
            line.append(_INDENT)
        lines.append(line)
    return lines


def _make_color(pixel: Any) -> Color:
    return Color.from_rgb(*map(int, pixel))


def _read_frames(item: SampleMedia) -> list[Image.Image]:
    """Return three frames of a video: the first one, the middle one and the last one."""
    import av

    with av.open(item.path) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    places = np.linspace(0, len(frames) - 1, _NUM_FRAMES).round().astype(int)
    return [Image.fromarray(frames[place]) for place in places]


def _draw_audio(item: SampleMedia) -> Text:
    """Return a row of bars that show how loud audio is, from its beginning to its end."""
    import av

    with av.open(item.path) as container:
        pieces = [frame.to_ndarray().ravel() for frame in container.decode(audio=0)]
    samples = np.abs(np.concatenate(pieces).astype(np.float32))
    peaks = np.array([part.max() for part in np.array_split(samples, _NUM_BARS)])
    heights = np.ceil(peaks / max(peaks.max(), 1) * (len(_BARS) - 1)).astype(int)
    return Text("".join(_BARS[height] for height in heights), "cyan")
