"""Families × checks: how many tests of each kind passed, printed at the end of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

_PROPERTY = "parity"


class ParityTable:
    """A pytest plugin; under xdist it lives in the process that the others report to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._failed: set[tuple[str, str]] = set()

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
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self._passed, sort_keys=True, indent=1))


def mark_item(item: pytest.Item, family: str) -> None:
    """Let the reports of a parity test say what it checked."""
    marker = item.get_closest_marker("check")
    if marker is not None:
        item.user_properties.append((_PROPERTY, [family, marker.args[0]]))
