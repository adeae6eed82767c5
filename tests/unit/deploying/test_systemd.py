"""The unit of systemd starts the server with flags that exist, and lets requests end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sensorium.cli.keys import VARIABLE
from sensorium.server.options import ServeOptions
from tests.unit.deploying.reading import DEPLOY, expand, parse_serve, read_settings

UNIT = DEPLOY / "systemd" / "sensorium.service"
EXAMPLE = DEPLOY / "systemd" / "sensorium.env"
SETTINGS = read_settings(UNIT)


def get_defaults() -> dict[str, str]:
    """Return the variables that the unit itself sets."""
    return dict(value.split("=", 1) for value in SETTINGS["Environment"])


def parse(variables: dict[str, str]) -> ServeOptions:
    (line,) = SETTINGS["ExecStart"]
    program, *words = expand(line, variables)
    assert Path(program).name == "sensorium"
    return parse_serve(words)


def test_the_unit_without_settings_serves_this_machine_only() -> None:
    options = parse(get_defaults())
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.model == "sensorium-mini"


def test_the_example_of_settings_is_accepted() -> None:
    given = {name: values[-1] for name, values in read_settings(EXAMPLE).items()}
    assert set(given) == {"SENSORIUM_MODEL", "SENSORIUM_FLAGS"}
    options = parse(get_defaults() | given)
    cache = f"/var/cache/{SETTINGS['CacheDirectory'][0]}"
    assert str(options.media.mm_disk_cache).startswith(f"{cache}/")  # elsewhere it can't write


def test_settings_outside_the_example_are_accepted_and_override_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [line[2:] for line in EXAMPLE.read_text().splitlines() if line[:4] == "# SE"]
    given = {name: value for name, _, value in (line.partition("=") for line in lines)}
    assert set(given) == {"SENSORIUM_FLAGS", VARIABLE}
    monkeypatch.setenv(VARIABLE, given.pop(VARIABLE))
    options = parse(get_defaults() | given)
    assert (options.host, options.api_key) == ("0.0.0.0", ("SECRET",))
    assert "SECRET" not in expand(SETTINGS["ExecStart"][0], get_defaults() | given)


def test_a_stop_reaches_only_the_parent_and_waits_for_requests() -> None:
    assert SETTINGS["KillMode"] == ["mixed"]
    assert SETTINGS["KillSignal"] == ["SIGTERM"]
    assert int(SETTINGS["TimeoutStopSec"][0]) >= parse(get_defaults()).shutdown_timeout + 10


def test_all_caches_are_where_the_unit_may_write() -> None:
    folder = f"%C/{SETTINGS['CacheDirectory'][0]}"
    variables = get_defaults()
    for name in ("HOME", "XDG_CACHE_HOME", "SENSORIUM_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR"):
        assert variables[name].startswith(folder)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    # The program is not installed here, and systemd asks whether it can be run.
    text = UNIT.read_text().replace("/opt/sensorium/bin/sensorium", sys.executable)
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
