"""The command by another name."""

from __future__ import annotations

import runpy
import sys

import pytest

import sensorium


def test_the_package_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sensorium", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sensorium {sensorium.__version__}\n"
