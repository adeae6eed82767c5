"""One format of the log in all processes."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sensorium.server.logs import JsonFormatter, TextFormatter, set_up_logging

NAMES = ("", "sensorium", "uvicorn.access")


@pytest.fixture
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, levels = root.handlers, [logging.getLogger(name).level for name in NAMES]
    yield
    root.handlers = handlers
    for name, level in zip(NAMES, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)


def make_record(message: str, *arguments: object, **more: object) -> logging.LogRecord:
    record = logging.LogRecord("a.b", logging.INFO, "f", 1, message, arguments, None)
    record.__dict__.update(more)
    return record


def test_a_line_of_text_has_time_process_and_message() -> None:
    line = TextFormatter("core").format(make_record("%d steps", 3))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    core        a\.b: 3 steps", line
    )


def test_a_line_of_json_is_one_object_with_the_fields_of_its_call() -> None:
    fields = {"num_running": 2, "level": "never", "path": object}
    line = JsonFormatter("frontend-0").format(make_record("two\nlines", fields=fields))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["message"], entry["process"], entry["level"]) == (
        "two\nlines",
        "frontend-0",
        "info",
    )
    assert entry["num_running"] == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])


def test_a_traceback_stays_inside_its_line_of_json() -> None:
    try:
        raise ValueError("deep")
    except ValueError:
        record = make_record("failed", exc_info=sys.exc_info())
    line = JsonFormatter("core").format(record)
    assert "\n" not in line
    assert "ValueError: deep" in json.loads(line)["exception"]


@pytest.mark.usefixtures("_restored_logging")
def test_log_levels_apply_to_our_loggers_and_libraries_stay_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("core", log_format="json", log_level="debug", access_log=True)
    logging.getLogger("sensorium.x").debug("ours")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("their trouble")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "a", "GET", "/", "1.1", 200)
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["ours", "their trouble", 'a - "GET / HTTP/1.1" 200']


@pytest.mark.usefixtures("_restored_logging")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_full_disk_costs_lines_and_raises_nothing(log_format: str) -> None:
    """A device of the kernel takes nothing, as a disk that is full."""
    script = (
        "import logging, sys\nfrom sensorium.server.logs import set_up_logging\n"
        f"set_up_logging('core', log_format={log_format!r}, log_level='info')\n"
        "for number in range(1000):\n"
        "    logging.getLogger('sensorium').info('line %d', number)\n"
        "print('done', flush=True)\nimport os\nlogging.shutdown()\nos._exit(0)\n"
    )
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, timeout=120
        )
    assert (result.returncode, result.stdout) == (0, b"done\n")


@pytest.mark.usefixtures("_restored_logging")
def test_a_malformed_record_is_still_reported(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("core", log_format="text", log_level="info")
    logging.getLogger("sensorium").info("%d", "no number")
    assert "Logging error" in capsys.readouterr().err


def test_the_access_log_can_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("frontend-0", log_format="text", log_level="info", access_log=False)
    logging.getLogger("uvicorn.access").info("a request")
    assert capsys.readouterr().err == ""
