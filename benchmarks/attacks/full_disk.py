"""Attack 14: the directory for temporary files fills up while the server runs.

It needs the right to mount. The server must be started with `TMPDIR` in the directory of
`small_disk`, so unlike the other attacks this one takes that directory, not an address.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS: tuple[str, ...] = ()
_NUM_BYTES = 2**20
_CHUNK_BYTES = 2**12


class CannotMountError(Exception):
    """This user may not mount a file system."""


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB there, and unmount it in any case."""
    directory.mkdir(exist_ok=True)
    options = f"size={_NUM_BYTES},mode=700"
    try:
        command = ["mount", "-t", "tmpfs", "-o", options, "sensorium-attack", str(directory)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotMountError(str(error)) from error
    try:
        yield directory
    finally:
        # At once for new accesses, and for good when nothing in it is open any more.
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=60)


@contextmanager
def attack(directory: Path) -> Iterator[None]:
    """Fill the disk to its last byte, and keep it full while the block runs."""
    path = directory / "filling"
    try:
        fill(path)
        yield
    finally:
        path.unlink(missing_ok=True)


def fill(path: Path) -> None:
    """Write until nothing more fits on the disk, which `small_disk` keeps small."""
    with path.open("ab", buffering=0) as file:
        for _ in range(2 * _NUM_BYTES // _CHUNK_BYTES):
            try:
                file.write(bytes(_CHUNK_BYTES))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return
    raise AssertionError("the disk did not fill up")


def get_free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
