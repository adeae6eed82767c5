"""What stands in each token, and the heads that ask for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training.guides import Guides
from training.landmarks import NUM_VALUES, count_so_far, find_landmarks
from training.mentions import MentionFinder
from training.pictures.packing import pack_canvases
from training.pictures.shapes import SHAPE_NAMES
from training.samples import Canvas, Line, Sprite
from training.tasks.palette import COLOURS

RED, BLUE = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)
GRID = (3, 4)


def find(*sprites: Sprite, lines: tuple[Line, ...] = ()) -> np.ndarray:
    canvas = Canvas(sprites=list(sprites), lines=list(lines))
    found = find_landmarks(pack_canvases([Canvas(), canvas]), GRID)
    assert not found[0].any()
    return found[1].reshape(*GRID, -1)


def test_a_shape_fills_its_box_and_has_one_middle() -> None:
    star = SHAPE_NAMES.index("star")
    found = find(Sprite("shape", star, 56.0, 28.0, 60.0, 60.0, 0.0, RED))
    assert found[:2, 1:3, 0].tolist() == [[1 + star] * 2] * 2
    assert found[:2, 1:3, 1].tolist() == [[1 + COLOURS.index("red")] * 2] * 2
    assert found[..., 0].astype(bool).sum() == 4
    assert found[..., 2].sum() == found[1, 2, 2] == 1
    assert not found[..., 3:].any()


def test_a_thing_smaller_than_a_token_is_not_lost() -> None:
    found = find(Sprite("shape", 0, 3.0, 80.0, 5.0, 5.0, 0.0, BLUE))
    assert found[2, 0, :3].tolist() == [1, 1 + COLOURS.index("blue"), 1]
    assert found[..., 0].astype(bool).sum() == 1


def test_later_things_cover_earlier_ones_and_grounds_are_nothing() -> None:
    ground = Sprite("shape", 1, 300.0, 42.0, 500.0, 500.0, 0.0, BLUE)
    lower = Sprite("shape", 2, 42.0, 42.0, 80.0, 80.0, 0.0, BLUE)
    upper = Sprite("shape", 3, 42.0, 42.0, 20.0, 20.0, 0.0, RED)
    found = find(ground, lower, upper)
    assert found[..., 0].tolist() == [[3, 3, 3, 0], [3, 4, 3, 0], [3, 3, 3, 0]]


def test_emoji_have_one_number_for_both_styles_and_no_colour() -> None:
    for number in (6, 7):
        found = find(Sprite("emoji", number, 42.0, 14.0, 28.0, 28.0))
        assert found[0, 1, :3].tolist() == [1 + len(SHAPE_NAMES) + 3, 0, 1]


@pytest.mark.parametrize("angle", [0.0, np.pi / 2])
def test_letters_are_found_where_they_stand(angle: float) -> None:
    """A line of three letters with gaps, 42 x 14 pixels, lying or upright."""
    letters = np.repeat(np.array([5, 0, 6, 0, 7], np.uint8), [10, 4, 14, 4, 10])
    line = Line(np.full((48, len(letters)), 255, np.uint8), letters)
    found = find(Sprite("line", 0, 35.0, 35.0, 42.0, 14.0, angle, RED), lines=(line,))
    slots = found[..., 3:].reshape(3, 4, 2, 4).transpose(0, 2, 1, 3).reshape(6, 16)
    if angle == 0.0:  # slots are 7 pixels wide and 14 high
        assert slots[2, 2:8].tolist() == [5, 0, 6, 6, 0, 7]
        assert not slots[[0, 1, 3, 4, 5]].any()
        assert found[1, 1, 1] == 1 + COLOURS.index("red")
    else:
        assert slots[1:4, 4:6].tolist() == [[5, 5], [6, 6], [7, 7]]
    assert not found[..., 0].any()


def test_things_are_counted_in_the_order_of_tokens() -> None:
    """A red star, below it another and a blue one, and a red circle at the end."""
    star, circle = SHAPE_NAMES.index("star"), SHAPE_NAMES.index("circle")
    things = [(circle, 100.0, 70.0, RED), (star, 14.0, 14.0, RED), (star, 42.0, 42.0, RED)]
    things.append((star, 98.0, 42.0, BLUE))
    sprites = [Sprite("shape", n, x, y, 20.0, 20.0, 0.0, colour) for n, x, y, colour in things]
    text = Canvas(sprites=[*sprites, Sprite("line", 0, 35.0, 35.0, 42.0, 14.0)])
    text.lines.append(Line(np.full((48, 8), 255, np.uint8), np.ones(8, np.uint8)))
    packed = pack_canvases([Canvas(sprites=sprites), text])
    found = count_so_far(packed.sprites, GRID)
    counted = {int(at): found[0, at].tolist() for at in np.flatnonzero(found[0].any(-1))}
    assert counted == {0: [1, 1, 1, 1], 5: [2, 2, 2, 2], 7: [1, 3, 1, 3], 11: [1, 1, 3, 4]}
    assert not found[1].any()  # shapes behind letters are decoration


def test_names_in_questions_lead_to_the_only_thing_that_has_them() -> None:
    numbers: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [numbers.setdefault(word, len(numbers)) for word in text.split()]

    finder = MentionFinder(encode)
    star, circle = SHAPE_NAMES.index("star"), SHAPE_NAMES.index("circle")
    things = [(star, 14.0, 14.0, RED), (star, 98.0, 42.0, BLUE), (circle, 42.0, 70.0, RED)]
    canvas = Canvas(
        sprites=[Sprite("shape", n, x, y, 20.0, 20.0, 0.0, colour) for n, x, y, colour in things]
    )

    def find_in(question: str) -> list[tuple[int, int, int]]:
        return list(finder.find(encode(question), canvas))

    assert find_in("is the red star left of the circle") == [(3, 0, 0), (7, 2, 1)]
    assert find_in("is the star left of the blue thing") == [(7, 1, 3)]
    assert find_in("is the red thing a blue circle") == []
    for colour in ("gray", "grey"):
        assert find_in(f"is a {colour} circle left of the circle") == [(7, 2, 1)]


def test_guides_learn_what_is_asked_and_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    guides = Guides(32)
    seen = torch.randn(2, 12, 32)
    landmarks = torch.stack([torch.randint(0, values, (2, 12)) for values in NUM_VALUES], -1)
    optimizer = torch.optim.Adam(guides.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        loss = guides.judge_landmarks(seen, landmarks) + guides.judge_places(seen, GRID)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    guides.save(tmp_path)
    others = Guides(32)
    others.restore(tmp_path)
    assert others.judge_landmarks(seen, landmarks).item() == pytest.approx(
        guides.judge_landmarks(seen, landmarks).item(), abs=0.05
    )
