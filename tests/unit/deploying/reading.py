"""Reads the files in deploy/, and the command lines in them with the parsers of the package."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from sensorium.cli.serve import add_serve, make_options
from sensorium.server.http.routes import ROUTES
from sensorium.server.options import ServeOptions

ROOT = Path(__file__).parent.parent.parent.parent
DEPLOY = ROOT / "deploy"


def read_manifests(name: str) -> dict[str, dict[str, Any]]:
    """Return kind -> resource, for a file of Kubernetes resources that has one of each kind."""
    resources = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
    by_kind = {resource["kind"]: resource for resource in resources}
    assert len(by_kind) == len(resources)
    return by_kind


def read_instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile with their arguments, in their order."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def get_instruction(name: str) -> str:
    """Return the arguments of the last instruction of this name in the Containerfile."""
    return [rest for each, rest in read_instructions() if each == name][-1]


def read_settings(path: Path) -> dict[str, list[str]]:
    """Return name -> values, for a unit of systemd or a file of environment variables."""
    settings: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, has_value, value = line.partition("=")
        if has_value and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def parse_serve(words: list[str]) -> ServeOptions:
    """Return the options of a command line that begins with `serve`. Exits if one is wrong."""
    parser = argparse.ArgumentParser()
    add_serve(parser.add_subparsers(required=True))
    return make_options(parser.parse_args(words))


def expand(line: str, variables: dict[str, str]) -> list[str]:
    """Return the words of a command line as systemd makes them: `$NAME` may be several words."""
    words = []
    for word in shlex.split(line):
        name = word.lstrip("$").strip("{}")
        is_list = word == f"${name}"
        if not word.startswith("$"):
            words.append(word)
        else:
            words += variables[name].split() if is_list else [variables[name]]
    return words


def can_get(path: str) -> bool:
    """Return whether the server has a route for GET at this path."""
    return any(route.path == path and "GET" in route.methods for route in ROUTES)
