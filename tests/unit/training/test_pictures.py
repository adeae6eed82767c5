"""What is drawn, and how it is fed: a small atlas of our own, the stock processors as reference."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers' processors)
from training.pictures.emoji_names import EMOJI_GROUPS, EMOJI_ICONS, EMOJI_NAMES
from training.pictures.lines import (
    CELL_ORIGIN,
    CELL_WIDTH,
    CHARACTERS,
    FONTS,
    HELD_OUT_FONT,
    HELD_OUT_FONTS,
    LINE_HEIGHT,
    TRAIN_FONTS,
    make_line,
)
from training.pictures.patches import _as_jpeg
from training.pictures.rendering import (
    Renderer,
    augment,
    normalize_and_patch,
    normalize_and_patch_video,
    pack_canvases,
)
from training.pictures.shapes import SHAPE_NAMES, draw_shapes
from training.samples import Canvas, Line, Sprite

RED, BLUE = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)
SQUARE, CIRCLE = SHAPE_NAMES.index("square"), SHAPE_NAMES.index("circle")


@pytest.fixture(scope="module")
def atlas_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real shapes, plain emoji of four colours, and glyphs that are bars of 10 columns."""
    path = tmp_path_factory.mktemp("pictures") / "pictures.npz"
    emoji = np.zeros((2, 2, 96, 96, 4), np.uint8)
    for number, colour in enumerate(((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0))):
        emoji[number // 2, number % 2] = (*colour, 255)
    glyphs = np.zeros((len(FONTS), len(CHARACTERS), LINE_HEIGHT, CELL_WIDTH), np.uint8)
    glyphs[..., 10:30, CELL_ORIGIN + 1 : CELL_ORIGIN + 11] = 255
    advances = np.full((len(FONTS), len(CHARACTERS) + 1), 12.0, np.float32)
    np.savez(path, shapes=draw_shapes(), emoji=emoji, glyphs=glyphs, advances=advances)
    return path


@pytest.fixture(scope="module")
def renderer(atlas_path: Path) -> Renderer:
    return Renderer(atlas_path)


def colour_at(picture: torch.Tensor, x: int, y: int) -> list[float]:
    return [round(value, 2) for value in picture[:, y, x].tolist()]


def blank(coverage: np.ndarray) -> Line:
    return Line(coverage, np.zeros(coverage.shape[1], np.uint8))


def random_canvases(number: int) -> list[Canvas]:
    random = np.random.default_rng(0)
    canvases = []
    for _ in range(number):
        canvas = Canvas(RED, BLUE, random.uniform(0, 6))
        canvas.lines = [
            blank(random.integers(0, 255, (LINE_HEIGHT, w), np.uint8)) for w in (51, 70)
        ]
        for k in range(int(random.integers(7))):
            place = random.uniform((-9, -9, 4, 4, -3), (120, 90, 90, 90, 3)).tolist()
            colour = (random.random(), random.random(), random.random())
            sprite = Sprite("shape", int(random.integers(2)), *place, colour)
            sprite.kind = ("shape", "emoji", "line")[k % 3]
            canvas.sprites.append(sprite)
        canvases.append(canvas)
    return canvases


def test_names_of_emoji_are_plain_unique_and_no_shapes() -> None:
    assert len(set(EMOJI_NAMES)) == len(EMOJI_NAMES) == len(set(EMOJI_ICONS)) > 300
    assert sum(map(len, EMOJI_GROUPS.values())) == len(EMOJI_NAMES)
    for name in EMOJI_NAMES:
        words = name.split(" ")
        assert name == name.lower()
        assert all(word.isalpha() for word in words)
        assert len(words) <= 2
        assert not set(words) & set(SHAPE_NAMES)


def test_shapes_touch_the_four_sides_of_their_square() -> None:
    shapes = draw_shapes()
    assert shapes.shape == (len(SHAPE_NAMES), 128, 128)
    for name, shape in zip(SHAPE_NAMES, shapes, strict=True):
        rows, columns = shape.any(axis=1).nonzero()[0], shape.any(axis=0).nonzero()[0]
        assert (rows[0], rows[-1], columns[0], columns[-1]) == (0, 127, 0, 127), name


def test_no_font_is_both_trained_on_and_held_out() -> None:
    assert sorted(TRAIN_FONTS + HELD_OUT_FONTS) == list(range(len(FONTS)))
    assert {FONTS[number][0] for number in HELD_OUT_FONTS} == {HELD_OUT_FONT}


def test_line_holds_its_letters_at_their_places(atlas_path: Path) -> None:
    line = make_line("ab c", 0, path=atlas_path)
    assert line.coverage.dtype == np.uint8
    ink = line.coverage[20].nonzero()[0] - 2  # the margin
    assert ink.tolist() == [*range(10), *range(12, 22), *range(36, 46)]
    letters = line.letters[2:-2]
    assert [CHARACTERS[n - 1] for n in letters[[0, 9, 12, 21, 36, 45]]] == list("aabbcc")
    assert not letters[[10, 11, 22, 35]].any()
    assert line.coverage.shape == (LINE_HEIGHT, 46 + 4)
    wide = make_line("ab c", 0, spacing=5.0, path=atlas_path)
    assert wide.coverage.shape == (LINE_HEIGHT, 46 + 4 + 15)


def test_sprites_stand_where_they_are_put(renderer: Renderer) -> None:
    canvas = Canvas(sprites=[Sprite("shape", SQUARE, 30, 40, 20, 10, 0.0, RED)])
    picture = renderer.render(pack_canvases([canvas]), (56, 84))[0]
    assert picture.shape == (3, 56, 84)
    drawn = (picture[1] < 0.5).nonzero()
    assert drawn.min(dim=0).values.tolist() == [35, 20]
    assert drawn.max(dim=0).values.tolist() == [44, 39]
    doubled = renderer.render(pack_canvases([canvas]), (56, 84), scale=2.0)[0]
    assert doubled.shape == (3, 112, 168)
    assert (doubled[1] < 0.5).sum() == 4 * len(drawn)


def test_one_unseen_style_replaces_all_others(atlas_path: Path, tmp_path: Path) -> None:
    emoji = np.zeros((2, 1, 96, 96, 4), np.uint8)
    emoji[0], emoji[1] = (0, 0, 255, 255), (255, 0, 255, 255)
    np.savez(tmp_path / "unseen.npz", emoji=emoji)
    renderer = Renderer(atlas_path, emoji_path=tmp_path / "unseen.npz")
    for number, colour in enumerate(([0, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 1])):
        canvas = Canvas(sprites=[Sprite("emoji", number, 28, 28, 40, 40)])
        assert colour_at(renderer.render(pack_canvases([canvas]), (56, 56))[0], 28, 28) == colour


def test_angle_turns_clockwise(renderer: Renderer) -> None:
    bar = Sprite("shape", SQUARE, 50, 50, 80, 10, np.pi / 4)
    picture = renderer.render(pack_canvases([Canvas(sprites=[bar])]), (100, 100))[0]
    assert colour_at(picture, 70, 70) == [0, 0, 0]
    assert colour_at(picture, 70, 30) == [1, 1, 1]


def test_later_sprites_cover_earlier_ones_and_kinds_mix(renderer: Renderer) -> None:
    canvas = Canvas(
        sprites=[
            Sprite("shape", SQUARE, 28, 28, 40, 40, 0.0, BLUE),
            Sprite("emoji", 3, 28, 28, 20, 20),
            Sprite("line", 0, 28, 28, 10, 10, 0.0, RED),
        ],
        lines=[blank(np.full((LINE_HEIGHT, 48), 255, np.uint8))],
    )
    picture = renderer.render(pack_canvases([Canvas(), canvas]), (56, 56))[1]
    assert colour_at(picture, 28, 28) == [1, 0, 0]
    assert colour_at(picture, 20, 28) == [1, 1, 0]  # concept 1, style 1
    assert colour_at(picture, 12, 28) == [0, 0, 1]
    assert colour_at(picture, 2, 28) == [1, 1, 1]


def test_background_changes_along_its_angle(renderer: Renderer) -> None:
    packed = pack_canvases([Canvas(RED, BLUE, 0.0), Canvas(RED)])
    changing, plain = renderer.render(packed, (28, 100))
    assert colour_at(changing, 0, 5) == [1, 0, 0]
    assert colour_at(changing, 74, 5) == pytest.approx([0.25, 0, 0.75], abs=0.02)
    assert bool((plain[0] == 1).all())


def test_small_things_keep_their_mean(renderer: Renderer) -> None:
    """Without smaller copies of the textures, a fine pattern would be all or nothing."""
    stripes = np.zeros((LINE_HEIGHT, 96), np.uint8)
    stripes[:, ::2] = 255
    sprites = [Sprite("line", 0, 28, 28, width, width / 2) for width in (12.0, 24.0, 30.0)]
    canvases = [Canvas(sprites=[sprite], lines=[blank(stripes)]) for sprite in sprites]
    pictures = renderer.render(pack_canvases(canvases), (56, 56))
    assert pictures[:, 0, 28, 28].tolist() == pytest.approx([0.5] * 3, abs=0.05)


def test_whole_batches_and_single_boxes_are_drawn_alike(atlas_path: Path) -> None:
    """The first is how GPUs draw, the second how CPUs do."""
    packed = pack_canvases(random_canvases(16))
    boxes, whole = Renderer(atlas_path), Renderer(atlas_path)
    whole._one_by_one = False
    for scale in (1.0, 0.5, 2.0):
        expected = whole.render(packed, (84, 112), scale=scale)
        assert torch.allclose(boxes.render(packed, (84, 112), scale=scale), expected, atol=1e-3)


def test_canvases_are_drawn_alike_singly_and_in_batches(renderer: Renderer) -> None:
    canvases = random_canvases(8)
    together = renderer.render(pickle.loads(pickle.dumps(pack_canvases(canvases))), (84, 112))
    assert together.min() >= 0
    assert together.max() <= 1
    for canvas, picture in zip(canvases, together, strict=True):
        alone = renderer.render(pack_canvases([canvas]), (84, 112))[0]
        assert torch.allclose(alone, picture, atol=1e-3)


def test_augmented_pictures_are_near_and_repeatable(renderer: Renderer) -> None:
    pictures = renderer.render(pack_canvases(random_canvases(8)), (84, 196))
    first, second = (augment(pictures, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == pictures.shape
    assert first.min() >= 0
    assert first.max() <= 1
    distances = (first - pictures).abs().mean(dim=(1, 2, 3))
    assert 0.001 < distances.min() < distances.max() < 0.2


def test_jpeg_steps_near_zero_change_nothing() -> None:
    pictures = torch.rand(2, 3, 28, 44)
    assert torch.allclose(_as_jpeg(pictures, torch.full((2, 1, 1, 1), 1e-5)), pictures, atol=1e-3)


@pytest.mark.parametrize("size", [(224, 224), (168, 308), (252, 196)])
def test_patches_are_those_of_the_stock_image_processor(size: tuple[int, int]) -> None:
    from transformers import Qwen2VLImageProcessor

    images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    processor = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 10**6})
    expected = processor(images=list(images), return_tensors="pt")
    patches = normalize_and_patch(images.float() / 255)
    assert expected["image_grid_thw"].tolist() == [[1, size[0] // 14, size[1] // 14]] * 2
    assert torch.allclose(patches.flatten(0, 1), expected["pixel_values"], atol=1e-4)


def test_patches_are_those_of_the_stock_video_processor() -> None:
    from transformers import Qwen2VLVideoProcessor

    frames = torch.randint(0, 256, (2, 8, 3, 112, 84), dtype=torch.uint8)
    processor = Qwen2VLVideoProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 10**6})
    expected = processor(videos=list(frames), return_tensors="pt")
    patches = normalize_and_patch_video(frames.float() / 255)
    assert expected["video_grid_thw"].tolist() == [[4, 8, 6]] * 2
    assert torch.allclose(patches.flatten(0, 1), expected["pixel_values_videos"], atol=1e-4)
