"""Makes the pictures' atlases: shapes, emoji of two styles and glyphs; a third style for tests.

    python -m training.assets_pictures build/training

Needs `npm` (packages of fixed versions, checked by sha256) and `resvg-py==0.5.0`. What comes from
whom, and its licence, stands in `training/pictures/SOURCES.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.pictures.emoji_names import EMOJI_ICONS, EMOJI_NAMES
from training.pictures.lines import (
    BASELINE,
    CELL_ORIGIN,
    CELL_WIDTH,
    CHARACTERS,
    FONT_SIZE,
    FONTS,
    LINE_HEIGHT,
)
from training.pictures.shapes import draw_shapes

EMOJI_SIZE = 96
EMOJI_STYLES = ("@iconify-json/noto@1.2.9", "@iconify-json/fluent-emoji-flat@1.2.6")
UNSEEN_STYLE = "@iconify-json/twemoji@1.2.5"
FONT_VERSION = "5.3.0"

SHA256 = {
    "@iconify-json/noto@1.2.9": "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
    "@iconify-json/fluent-emoji-flat@1.2.6": (
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"
    ),
    "@iconify-json/twemoji@1.2.5": (
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"
    ),
    "@fontsource/arimo@5.3.0": ("df44945077a74905969f15bba3b442f9fb6773818b2b59c970911deace01132f"),
    "@fontsource/comic-neue@5.3.0": (
        "0d242660fa8a3e31deb4ba0005b830904db4533ae3366f9c41724ff452662fa6"
    ),
    "@fontsource/cousine@5.3.0": (
        "a450d4756b5b9e666464df668728dbf1c6d62548b61324d4ac5778a5da27a3b8"
    ),
    "@fontsource/fira-sans@5.3.0": (
        "2231966721c4c3f70194c336dd11428e15139bd902cac415528715028c9cd5a9"
    ),
    "@fontsource/inter@5.3.0": ("02034af8d41dcc67ac8eab88f642e129bb8a2e8922abf30229c32725f54d8fd6"),
    "@fontsource/jetbrains-mono@5.3.0": (
        "1bbea47d1387406da5b6ccc4184cc61eae6851cc0db5c1d9bbd088ea9daa0b4a"
    ),
    "@fontsource/merriweather@5.3.0": (
        "348f20a775e50a50b508ab6660771df6905ab2ea695c6c2a8df889c5cceec42f"
    ),
    "@fontsource/nunito@5.3.0": (
        "4d8e1fb4f4a40c125c7a302b21e5c6810b86569b60bac0fa0405c04380f4c77b"
    ),
    "@fontsource/open-sans@5.3.0": (
        "95e6dd90f5860d0de22f791b6d802598743762c62e4894bfa26f80b1ea0cf3f5"
    ),
    "@fontsource/patrick-hand@5.3.0": (
        "c3428d02610c7b8fa92b044cf766f8c30b88bb32a47460b4ac42fa14e0bcdcc0"
    ),
    "@fontsource/roboto-condensed@5.3.0": (
        "03b2f8c75e4a4af7ae6180d0f3e9171a6dcbbcd5b1a02c48f5bcbd043a7a9868"
    ),
    "@fontsource/roboto-slab@5.3.0": (
        "45d42c2f30be7fa361c673a297cb75e151e977a57905e449d25875adf97e77f5"
    ),
    "@fontsource/tinos@5.3.0": ("218a9f3dfc1f43e595835ba84ffb1f69723f27cab54a50b5acd64c0fe067dbe2"),
}


def fetch_package(package: str, folder: Path) -> tarfile.TarFile:
    """Fetch an npm package's archive if the folder lacks it, and check its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    name, _, version = package.rpartition("@")
    path = folder / f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
    if not path.exists():
        print(f"fetching {package}", flush=True)
        command = ["npm", "pack", package, "--silent", "--pack-destination", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256[package]:
        raise ValueError(f"{package} has sha256 {found}, not {SHA256[package]}")
    return tarfile.open(path)


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    if member is None:
        raise FileNotFoundError(name)
    return member.read()


def draw_emoji(package: str, folder: Path) -> np.ndarray:
    """Draw every concept in one style: uint8 [concept, 96, 96, 4], not premultiplied."""
    import resvg_py

    with fetch_package(package, folder) as archive:
        icons = json.loads(_read(archive, "icons.json"))
    width, height = icons.get("width", 16), icons.get("height", 16)
    pictures = []
    for icon in EMOJI_ICONS:
        body = icons["icons"][icon]
        left, top = body.get("left", 0), body.get("top", 0)
        across, down = body.get("width", width), body.get("height", height)
        side = max(across, down)  # the few that are not square are centred
        box = (left + (across - side) / 2, top + (down - side) / 2, side, side)
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{" ".join(map(str, box))}">{body["body"]}</svg>'
        )
        png = resvg_py.svg_to_bytes(
            svg_string=svg, width=EMOJI_SIZE, height=EMOJI_SIZE, skip_system_fonts=True
        )
        pictures.append(np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGBA")))
        if len(pictures) % 100 == 0:
            print(f"{package}: {len(pictures)} of {len(EMOJI_ICONS)} drawn", flush=True)
    return np.stack(pictures)


def draw_glyphs(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Draw cells uint8 [font, character, 48, 64] and return them with the advances."""
    cells = np.zeros((len(FONTS), len(CHARACTERS), LINE_HEIGHT, CELL_WIDTH), np.uint8)
    advances = np.zeros((len(FONTS), len(CHARACTERS) + 1), np.float32)
    for number, (family, weight) in enumerate(FONTS):
        with fetch_package(f"@fontsource/{family}@{FONT_VERSION}", folder) as archive:
            file = io.BytesIO(_read(archive, f"files/{family}-latin-{weight}-normal.woff"))
        font = ImageFont.truetype(file, FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
        for n, character in enumerate(CHARACTERS):
            cell = Image.new("L", (CELL_WIDTH, LINE_HEIGHT))
            box = font.getbbox(character, anchor="ls")
            left, top, right, bottom = (
                box[0] + CELL_ORIGIN,
                box[1] + BASELINE,
                box[2] + CELL_ORIGIN,
                box[3] + BASELINE,
            )
            if left < 0 or top < 0 or right > CELL_WIDTH or bottom > LINE_HEIGHT:
                raise ValueError(f"{character} of {family} {weight} is larger than its cell: {box}")
            ImageDraw.Draw(cell).text((CELL_ORIGIN, BASELINE), character, 255, font, anchor="ls")
            cells[number, n] = np.asarray(cell)
        advances[number] = [font.getlength(character) for character in (*CHARACTERS, " ")]
        print(f"{family} {weight}: {len(CHARACTERS)} glyphs drawn", flush=True)
    return cells, advances


def _save(path: Path, **arrays: np.ndarray) -> None:
    np.savez_compressed(path, allow_pickle=False, **arrays)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, sha256 {found}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the atlases are written")
    folder: Path = parser.parse_args(arguments).folder
    packages = folder / "packages"
    names = np.array(EMOJI_NAMES)
    styles = [draw_emoji(package, packages) for package in EMOJI_STYLES]
    cells, advances = draw_glyphs(packages)
    _save(
        folder / "pictures.npz",
        shapes=draw_shapes(),
        emoji=np.stack(styles, axis=1),
        emoji_names=names,
        glyphs=cells,
        advances=advances,
    )
    unseen = draw_emoji(UNSEEN_STYLE, packages)[:, None]
    _save(folder / "emoji_unseen.npz", emoji=unseen, emoji_names=names)


if __name__ == "__main__":
    main()
