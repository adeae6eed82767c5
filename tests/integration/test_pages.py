"""Every example of the README and of docs/ runs as it is printed, against a real server.

Blocks of Python and of shell are run, page by page and in their order; the Python blocks of a page
share one process. A block of `text` behind another one is what that one prints. Only the server's
address and the folder of the virtual environment are replaced. A block that can't run here stands
behind a comment `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.nursery import get_nursery
from tests.support.server import EMBEDDED_CACHE, POOL, ROOT, ServerProcess, serve

pytestmark = pytest.mark.xdist_group("pages")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = "python"
SHELLS = ("sh", "bash")
# Blocks that can't run in a test, with their numbers. Never add one without need.
NOT_RUN = {
    "README.md": 1,
    "docs/deployment.md": 5,
    "docs/sensorium-mini.md": 1,
    "docs/speech.md": 3,
    "docs/realtime.md": 1,
    "docs/scaling.md": 4,
}
TIMEOUT_S = 300.0
BETWEEN = "\x1e"  # printed between the blocks of a page
_BLOCK = re.compile(
    r"(?P<mark><!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"^ *```(?P<language>\w+)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(slots=True, kw_only=True)
class Block:
    language: str
    code: str
    is_run: bool
    printed: str | None = None  # None: the page does not show what it prints


def read_blocks(page: Path) -> list[Block]:
    """Return the page's blocks of Python and of shell, with what they print."""
    blocks: list[Block] = []
    end = 0
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        follows = text[end : found.start()].strip() == ""
        end = found.end()
        if found["language"] in ("python", *SHELLS):
            is_run = found["mark"] is None
            blocks.append(Block(language=found["language"], code=found["code"], is_run=is_run))
        elif found["language"] == "text" and follows and blocks:
            blocks[-1].printed = found["code"]
    return blocks


def get_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUNNABLE = [page for page in PAGES if any(block.is_run for block in read_blocks(page))]
# Pages for `make test-slow`. In short: tests/integration/test_outside_frontend.py and the tests of
# the embedded model.
SLOW = ("docs/integrating.md", "docs/sensorium-mini.md")


@pytest.fixture(scope="module")
def page_server() -> Iterator[ServerProcess]:
    with serve("sensorium-mini", *POOL) as server:
        yield server


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if get_name(page) in SLOW else ())
        for page in RUNNABLE
    ],
    ids=get_name,
)
def test_every_example_runs_as_it_is_printed(page: Path, page_server: ServerProcess) -> None:
    blocks = [block for block in read_blocks(page) if block.is_run]
    scripts = [block for block in blocks if block.language == "python"]
    if scripts:
        code = f"\nprint({BETWEEN!r}, end='')\n".join(block.code for block in scripts)
        outputs = run([PYTHON, code], page_server).split(BETWEEN)
        for block, output in zip(scripts, outputs, strict=True):
            check(block, output)
    for block in blocks:
        if block.language in SHELLS:
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            check(block, run(command, page_server))


def run(command: list[str], server: ServerProcess) -> str:
    """Return what the command prints, in an environment as the pages assume it."""
    address = server.get_url().removeprefix("http:")  # the examples also have ws:
    code = command[-1].replace("//127.0.0.1:8000", address).replace(".venv/bin/", "")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SENSORIUM_CACHE_DIR": EMBEDDED_CACHE,
    }
    if command[0] == PYTHON:
        done = get_nursery().run(code, env=environment, timeout=TIMEOUT_S)
    else:
        done = subprocess.run(
            [*command[:-1], code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(block: Block, output: str) -> None:
    if block.printed is not None:
        assert output == block.printed, block.code
    assert '"error"' not in output, f"{block.code}\n{output}"


def test_few_blocks_are_not_run() -> None:
    numbers = {
        get_name(page): sum(not block.is_run for block in read_blocks(page)) for page in PAGES
    }
    assert {name: number for name, number in numbers.items() if number} == NOT_RUN
