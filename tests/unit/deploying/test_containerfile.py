"""The Containerfile copies what exists, and starts a server that its own health check can reach."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sensorium.scale.proxy import PATH, VARIABLE
from tests.unit.deploying.reading import (
    ROOT,
    can_get,
    get_instruction,
    parse_serve,
    read_instructions,
    read_manifests,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def list_copied() -> list[str]:
    """Return the files and folders of the repository that the Containerfile copies."""
    copies = [rest.split() for name, rest in read_instructions() if name == "COPY"]
    return [source for words in copies if words[0][:2] != "--" for source in words[:-1]]


def test_only_what_exists_is_copied_and_nothing_else_is_sent_to_the_builder() -> None:
    copied = list_copied()
    assert [name for name in copied if not (ROOT / name).exists()] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied)


@pytest.mark.processes
def test_what_is_copied_is_enough_for_the_wheel(tmp_path: Path) -> None:
    for name in list_copied():
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("sensorium-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sensorium/scale/deployment.py" in names
    assert any(name.endswith("licenses/NOTICE") for name in names)


def test_the_base_is_a_python_that_is_tested_and_the_extras_exist() -> None:
    arguments = dict(
        rest.split("=", 1) for name, rest in read_instructions() if name == "ARG" and "=" in rest
    )
    (version,) = re.findall(r"python:(\d+\.\d+)-slim$", arguments["BASE"])
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"])


def test_versions_come_only_from_the_constraints() -> None:
    runs = [rest for name, rest in read_instructions() if name == "RUN"]
    installs = [
        step for run in runs for step in run.split("&&") if re.search(r"/pip\s+install", step)
    ]
    assert len(installs) == 2
    for step in installs:
        assert "--constraint constraints.txt" in step
        assert "==" not in step


def test_the_server_listens_where_the_health_check_asks() -> None:
    entry, words = json.loads(get_instruction("ENTRYPOINT")), json.loads(get_instruction("CMD"))
    assert entry[-1] in PROJECT["scripts"]
    options = parse_serve(words)
    assert options.host == "0.0.0.0"
    assert get_instruction("EXPOSE") == str(options.port)
    check = get_instruction("HEALTHCHECK").partition("CMD ")[2]
    address = urlsplit(json.loads(check)[-1])
    assert address.port == options.port
    assert can_get(address.path)
    assert get_instruction("STOPSIGNAL") == "SIGTERM"


def test_the_user_is_not_root_and_is_the_one_of_the_pods() -> None:
    user, group = map(int, get_instruction("USER").split(":"))
    assert user > 0
    deployment = read_manifests("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]
    cluster = read_manifests("rayservice.yaml")["RayService"]["spec"]["rayClusterConfig"]
    pods = [
        deployment,
        cluster["headGroupSpec"]["template"]["spec"],
        *(each["template"]["spec"] for each in cluster["workerGroupSpecs"]),
    ]
    for pod in pods:
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert (security["runAsUser"], security["runAsGroup"]) == (user, group)
        assert security["fsGroup"] == group  # else the volume can't be written


def test_all_caches_are_in_the_volume() -> None:
    volume = get_instruction("VOLUME")
    words = get_instruction("ENV").split()
    variables = dict(word.split("=", 1) for word in words)
    for name in ("SENSORIUM_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        assert Path(variables[name]).is_relative_to(volume)


def test_proxies_of_ray_have_the_connections_of_a_server() -> None:
    assert f"{VARIABLE}={PATH}" in get_instruction("ENV").split()
