"""Files that are damaged, or made to do damage: each is decoded or refused, and that is all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.damaged_media import CEILING_MB
from tests.integration.media_bombs import BOMBS, make_mp4_with_table

ROOT = Path(__file__).parent.parent.parent
NUM_OF_EACH = 70
SEED = 4


@pytest.fixture(scope="module")
def report() -> Any:
    """What came of them, from the one process that all of them were decoded in."""
    files = [(modality, make()) for modality, make in BOMBS.values()]
    files.append(("video", make_mp4_with_table()))
    packed = b"".join(
        modality.encode().ljust(8) + len(data).to_bytes(8, "big") + data for modality, data in files
    )
    # Warnings of libraries about damaged files are no errors, as in a running server.
    program = [sys.executable, "-W", "ignore", "-m", "tests.integration.damaged_media"]
    completed = subprocess.run(
        [*program, str(NUM_OF_EACH), str(SEED)],
        input=packed,
        capture_output=True,
        timeout=300,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert completed.returncode == 0, completed.stderr.decode()[-2000:]
    return json.loads(completed.stdout)


def test_damaged_files_are_decoded_or_refused_and_nothing_else(report: Any) -> None:
    outcomes = report["damaged"]["outcomes"]
    assert outcomes.keys() == {"decoded", "refused"}, outcomes
    assert sum(outcomes.values()) >= 2000
    assert min(outcomes.values()) > 300
    assert report["damaged"]["slowest_s"] < 2
    assert report["damaged"]["grown_mb"] < 150


def test_small_files_that_ask_for_much_memory_do_not_get_it(report: Any) -> None:
    bombs = dict(zip(BOMBS, report["bombs"], strict=True))
    grown_mb = {name: bomb["grown_mb"] for name, bomb in bombs.items()}
    assert sum(grown_mb.values()) < 60, grown_mb
    outcomes = {name: bomb["outcome"] for name, bomb in bombs.items()}
    assert outcomes.pop("mp3 cover") == ""  # the audio is good, and its cover is never read
    for name in ("png note", "png profile", "webm"):
        assert "truncated or damaged" in outcomes.pop(name)
    outcomes.pop("avif", None)  # its own library may refuse it first
    for name, outcome in outcomes.items():
        assert "pixels, which is the limit" in outcome, (name, outcome)


def test_a_table_that_is_too_long_is_refused_below_a_ceiling(report: Any) -> None:
    table = report["table"]
    assert table["outcome"]
    assert table["num_bytes"] < 2000
    assert table["grown_mb"] < CEILING_MB
