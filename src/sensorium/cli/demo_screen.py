"""What the demo shows: plain text, and media drawn with characters if the terminal can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sensorium.embedded.samples import SampleMedia

if TYPE_CHECKING:
    from sensorium.cli.demo_server import Answer

_INDENT = "  "
_PICTURE_SIDE = 32
_FRAME_SIDE = 20
_NUM_FRAMES = 3
_MIN_WIDTH = len(_INDENT) + _NUM_FRAMES * (_FRAME_SIDE + 2)
_BARS = " ▁▂▃▄▅▆▇█"
_NUM_BARS = 60
_UPPER_HALF = "▀"


class _Console(Console):
    """A console that lets the command see a broken pipe, as all commands do."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Screen:
    """A screen that writes text and draws media on the terminal."""

    def __init__(self, *, has_color: bool = True) -> None:
        # rich finds out which colors there are, and obeys NO_COLOR. Without a color system there is
        # no style at all.
        self._console = _Console(color_system="auto" if has_color else None, highlight=False)

    @property
    def can_draw(self) -> bool:
        """Return whether media can be drawn on this terminal."""
        console = self._console
        has_color = console.is_terminal and console.color_system and not console.no_color
        return bool(has_color) and console.width >= _MIN_WIDTH and console.encoding == "utf-8"

    def say(self, text: str = "", style: str = "") -> None:
        """Write a line of text."""
        self._console.print(Text(make_printable(text), style), soft_wrap=True)

    def write(self, text: str) -> None:
        """Write a piece of an answer, without a new line."""
        self._console.print(Text(make_printable(text), end=""), end="", soft_wrap=True)

    def show_media(self, item: SampleMedia) -> None:
        """Draw a media item, if the terminal can show it."""
        if not self.can_draw:
            return
        for line in _draw(item):
            self._console.print(Text(_INDENT) + line, no_wrap=True)

    def show_times(self, rows: Sequence[tuple[str, Answer, Answer]]) -> None:
        """Write a table of titles and of the times of two answers."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("first", "again", "saved"):
            table.add_column(name, justify="right")
        for title, first, again in rows:
            saved = first.seconds - again.seconds
            times = (f"{value:.3f} s" for value in (first.seconds, again.seconds, saved))
            table.add_row(title, *times)
        self._console.print(table)


def make_printable(text: str) -> str:
    """Return text without characters that could move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _draw(item: SampleMedia) -> list[Text]:
    if item.modality == "audio":
        return [_draw_sound(item)]
    if item.modality == "image":
        with Image.open(item.path) as image:
            return draw_pictures([image.convert("RGB")], _PICTURE_SIDE)
    return draw_pictures(_read_frames(item), _FRAME_SIDE)


def draw_pictures(images: Sequence[Image.Image], side: int) -> list[Text]:
    """Draw pictures beside each other. A character has two pixels, one above the other."""
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
    """Return the first frame of a video, the last one, and some between."""
    import av

    with av.open(item.path) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    places = np.linspace(0, len(frames) - 1, _NUM_FRAMES).round().astype(int)
    return [Image.fromarray(frames[place]) for place in places]


def _draw_sound(item: SampleMedia) -> Text:
    """Draw how loud a sound is, from its beginning to its end."""
    import av

    with av.open(item.path) as container:
        pieces = [frame.to_ndarray().ravel() for frame in container.decode(audio=0)]
    samples = np.abs(np.concatenate(pieces).astype(np.float32))
    peaks = np.array([part.max() for part in np.array_split(samples, _NUM_BARS)])
    heights = np.ceil(peaks / max(peaks.max(), 1) * (len(_BARS) - 1)).astype(int)
    return Text("".join(_BARS[height] for height in heights), "cyan")
