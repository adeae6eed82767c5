"""Where in a picture the things are that a question names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from training.architecture import UNIT
from training.landmarks import MAX_THING
from training.pictures.shapes import SHAPE_NAMES
from training.samples import Canvas, Sprite
from training.tasks.palette import COLOURS, name_of

Mention = tuple[int, int, int]  # token, and row and column of the thing


class MentionFinder:
    """Finds names of shapes in tokens: after a space, each word of one is one token."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._shapes = {encode(f" {name}")[-1]: n for n, name in enumerate(SHAPE_NAMES)}
        self._colours = {encode(f" {name}")[-1]: n for n, name in enumerate(COLOURS)}
        self._colours[encode(" grey")[-1]] = COLOURS.index("gray")
        self._nouns = {*self._shapes, encode(" thing")[-1]}

    def find(self, tokens: list[int], canvas: Canvas) -> Iterator[Mention]:
        """Return one mention for each name that only one thing of the picture has."""
        places = [at for at, token in enumerate(tokens) if token in self._nouns]
        things = list(_name_things(canvas)) if places else []
        for at in places:
            token = tokens[at]
            shape = self._shapes.get(token)
            colour = self._colours.get(tokens[at - 1]) if at else None
            named = [
                sprite
                for sprite, its_shape, its_colour in things
                if shape in (None, its_shape) and colour in (None, its_colour)
            ]
            if len(named) == 1:
                yield at, int(named[0].y // UNIT), int(named[0].x // UNIT)


def _name_things(canvas: Canvas) -> Iterator[tuple[Sprite, int, int]]:
    """Yield each shape with its number and colour, if the picture has nothing but shapes."""
    if all(sprite.kind == "shape" for sprite in canvas.sprites):
        for sprite in canvas.sprites:
            if sprite.width < MAX_THING:
                yield sprite, sprite.number, name_of(sprite.colour)
