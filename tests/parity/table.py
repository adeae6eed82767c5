"""Families × checks: how many tests of each kind passed, printed at the end of a run.

`--collect-only` writes instead how many there are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

_PROPERTY = "parity"


class ParityTable:
    """A pytest plugin; under xdist it lives in the process that the others report to.

    It writes into `directory`: `parity.json` after a run, `parity-collected.json` without one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._passed: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._failed: set[tuple[str, str]] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            collected: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
            for item in session.items:
                for name, value in item.user_properties:
                    if name == _PROPERTY:
                        family, check = value  # type: ignore[misc]
                        collected[family][check] += 1
            self._write("parity-collected.json", collected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                family, check = value  # type: ignore[misc]
                if report.failed:
                    self._failed.add((family, check))
                elif report.when == "call" and report.passed:
                    self._passed[family][check] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._passed and not self._failed:
            return
        families = sorted({*self._passed, *(family for family, _ in self._failed)})
        terminalreporter.section("parity with Transformers: tests passed")
        for family in families:
            checks = {**self._passed[family]}
            cells = [
                f"{check} {'FAILED' if (family, check) in self._failed else checks.get(check, 0)}"
                for check in sorted({*checks, *(c for f, c in self._failed if f == family)})
            ]
            terminalreporter.write_line(f"{family:16} {' · '.join(cells)}")
        if not self._failed:
            self._write("parity.json", self._passed)

    def _write(self, name: str, table: dict[str, dict[str, int]]) -> None:
        self._directory.mkdir(exist_ok=True)
        (self._directory / name).write_text(json.dumps(table, sort_keys=True, indent=1))


def mark_item(item: pytest.Item, family: str) -> None:
    """Let the reports of a parity test say what it checked."""
    marker = item.get_closest_marker("check")
    if marker is not None:
        item.user_properties.append((_PROPERTY, [family, marker.args[0]]))
