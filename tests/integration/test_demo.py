"""The command `sensorium demo` on a tiny model that answers at random."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from sensorium import cli
from sensorium.cli.demo import Screen, show_samples
from sensorium.cli.demo_server import DemoClient
from sensorium.embedded.samples import DEMO_SAMPLES
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server-page")


def check(shown: str) -> None:
    assert "\x1b" not in shown
    first, again = shown.split("Again:")
    num_items = sum(len(sample.files) for sample in DEMO_SAMPLES)
    num_new = len({name for sample in DEMO_SAMPLES for name in sample.files})
    assert len(re.findall(r"(image|audio|video) decoded in", first)) == num_new
    assert len(re.findall(r"(image|audio|video) from the processor cache", again)) == num_items
    assert "encoded" not in again
    for sample in DEMO_SAMPLES:
        row = rf"{sample.title} +\d+\.\d{{3}} s +\d+\.\d{{3}} s +-?\d+\.\d{{3}} s"
        assert re.search(row, shown), sample.title


def test_other_questions_about_the_same_media_are_answered_from_caches(
    omni_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    omni_server.reset_caches()
    with DemoClient(omni_server.get_url(), max_tokens=4) as client:
        client.connect()
        show_samples(Screen(), client)
    check(capsys.readouterr().out)


@pytest.mark.slow
def test_the_demo_starts_and_ends_a_server_of_its_own(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "demo", tiny_model("qwen2_5_omni")])
    cli.main()
    check(capsys.readouterr().out)
