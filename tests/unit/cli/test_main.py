"""The command by another name."""

from __future__ import annotations

import argparse
import io
import runpy
import sys

import pytest

import sensorium
from sensorium import cli


def test_the_package_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sensorium", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sensorium {sensorium.__version__}\n"


def test_what_a_terminal_can_not_show_does_not_end_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    arguments = argparse.Namespace(run=lambda _: print("\N{DOG}: é"))
    monkeypatch.setattr(cli, "_parse_arguments", lambda: arguments)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "latin-1"))
    cli.main()
    assert shown.getvalue().decode("latin-1") == "?: é\n"
