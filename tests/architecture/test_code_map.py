"""ARCHITECTURE.md describes every folder of the package, and names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "sensorium"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
# Their rows are those of the folders that they are in.
INSIDE_OTHERS = {"layers/attention", "layers/kernels", "render/answers/formats"}


def list_rows() -> set[str]:
    """Return the first columns of the code map."""
    code_map = TEXT.partition("## The code map")[2].partition("\n## ")[0]
    return set(re.findall(r"(?m)^\| `([\w/]+)` \|", code_map))


def list_folders() -> set[str]:
    """Return the folders of the package that have modules."""
    modules = PACKAGE.rglob("*.py")
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in modules}
    return folders - {"."}


def test_every_folder_has_its_row_and_every_row_its_folder() -> None:
    assert list_folders() - INSIDE_OTHERS - list_rows() == set()
    assert list_rows() - list_folders() == set()


def test_the_files_to_read_first_are_twelve_and_exist() -> None:
    first = TEXT.partition("## Twelve files to read first")[2].partition("\n## ")[0]
    names = re.findall(r"(?m)^\d+\. `([\w/]+\.py)`", first)
    assert len(names) == 12
    assert [name for name in names if not (PACKAGE / name).exists()] == []
