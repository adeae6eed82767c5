"""Starts a real server for a benchmark, and reads its output and metrics.

It is run as a user runs it: the installed console script, or what that script does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
_MODULE = "from sensorium.cli import main; main()"
_READY = re.compile(r"Sensorium is ready: (http://\S+)")
_START_S = 300.0
_STOP_S = 90.0


def get_command() -> list[str]:
    """Return the console script next to this interpreter, or else a command for this checkout."""
    script = Path(sys.executable).with_name("sensorium")
    return [str(script)] if script.exists() else [sys.executable, "-c", _MODULE]


class LiveServer:
    """A server in processes of its own, with a log of both of its output streams."""

    def __init__(self, model: str, *flags: str, log: Path, command: str = "serve") -> None:
        self.log = log
        paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
        }
        self.started = time.monotonic()
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*get_command(), command, model, *flags],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for_url(self) -> str:
        """Wait until the server is ready, and return its address with the port that it chose."""
        deadline = self.started + _START_S
        while time.monotonic() < deadline:
            text = self.log.read_text()
            found = _READY.search(text)
            if found is not None:
                return found.group(1)
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}:\n{text}")
            time.sleep(0.05)
        raise SystemExit(f"the server is not ready:\n{self.log.read_text()}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the server and its children, whatever happened."""
        try:
            self.stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def read_metrics(url: str) -> dict[str, float]:
    """Return samples by name and labels, without the labels that all series have."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in ("model_name", "engine")
            )
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def get_quantile_bound(
    before: dict[str, float], after: dict[str, float], name: str, share: float
) -> float:
    """The upper bound of the bucket in which this share of a histogram's new samples is reached."""
    prefix = f'{name}_bucket{{le="'
    bounds = sorted(
        (float(key.removeprefix(prefix).removesuffix('"}')), value - before.get(key, 0.0))
        for key, value in after.items()
        if key.startswith(prefix)
    )
    total = bounds[-1][1]
    return next(bound for bound, num_below in bounds if num_below >= share * total)
