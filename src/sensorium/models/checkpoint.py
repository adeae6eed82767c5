"""Finds the directory of a checkpoint, and downloads it from the Hugging Face hub if needed.

It may be a local directory, a snapshot in the hub's cache, or the directory into which the embedded
model was expanded. All files of a model come from this directory, and so from one revision: a hub
id is resolved once, and the weights are fetched last, by the names in the snapshot's own index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from sensorium.checkpoints.files import check_presence, get_weight_names
from sensorium.checkpoints.first_look import find_directory, look_into
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.embedded.cache import find_embedded_model
from sensorium.types.errors import ModelError, SensoriumError

BAR_DELAY_S = 1.0
_TIMEOUT_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_BLOCKS, _BLOCK_BYTES = 64, 4096  # read from a file of weights to identify it
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_CODE_FILES = ("*.py",)
# Few models of the hub still have a name without an owner.
_SHORT_NAME = (
    f" (a hub id is like owner/name; commands take {EMBEDDED_MODEL}, which comes with the package, "
    "if no model is named)"
)


@contextmanager
def blame_checkpoint(model: str) -> Iterator[None]:
    """Turn all errors in a `with`, except Sensorium's own, into a `ModelError` with the model."""
    try:
        yield
    except SensoriumError:
        raise
    except Exception as error:  # broken files make libraries raise many kinds of errors
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise ModelError(f"{model[:200]!r} can't be loaded: {reason}") from error


def find_checkpoint(
    model: str, *, revision: str | None, trust_remote_code: bool, use_tqdm: bool
) -> Path:
    """Return a directory with all files of a model except its weights, downloaded if needed.

    `model` is a directory, a hub id, or the name of the embedded model. `revision` is a branch, tag
    or commit of a hub id. Python files are downloaded only with `trust_remote_code`. Raise
    `ModelError` if the model can't be found, or can't be run.
    """
    is_embedded = model == EMBEDDED_MODEL
    path = None if is_embedded else find_directory(model)
    if is_embedded or path is not None:
        if revision is not None:
            kind = "the embedded model" if is_embedded else "a directory"
            raise ModelError(f"revision={revision!r} needs a hub id, but {model!r} is {kind}")
        return path or find_embedded_model()
    patterns = _SMALL_FILES + (_CODE_FILES if trust_remote_code else ())
    directory = _fetch(model, revision=revision, patterns=patterns, use_tqdm=use_tqdm)
    look_into(directory)  # before gigabytes of weights are fetched
    return directory


def get_revision(directory: Path) -> str:
    """Return a hub snapshot's commit, or a digest of `config.json`, or "" without that file."""
    if directory.parent.name == "snapshots":
        return directory.name
    config = directory / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""


def get_weights_identity(directory: Path) -> str:
    """Return a text that identifies the weights of a checkpoint: no other weights have the same.

    For a snapshot in the hub's cache, it is the commit. Elsewhere it has the name, size and time of
    each file of weights, and a digest of some blocks. So a copy has the same text only if it keeps
    the times of the files.
    """
    is_snapshot = directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name)
    if is_snapshot and directory.parents[1].name.startswith("models--"):
        return directory.name
    lines = [get_revision(directory)]
    for path in sorted(directory.glob("*.safetensors")):
        found = path.stat()
        digest = _digest_blocks(path, found.st_size)
        lines.append(f"{path.name} {found.st_size} {found.st_mtime_ns} {digest}")
    return "\n".join(lines)


def _digest_blocks(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(_NUM_BLOCKS):
            file.seek(index * num_bytes // _NUM_BLOCKS)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def find_weights(model: str, directory: Path, *, use_tqdm: bool) -> tuple[Path, ...]:
    """Return the paths of a checkpoint's weights, downloaded if needed, or raise a `ModelError`."""
    names = get_weight_names(directory)
    if not Path(model).expanduser().is_dir() and not all(
        (directory / name).is_file() for name in names
    ):
        # The name of a snapshot's directory is its commit.
        _fetch(model, revision=directory.name, patterns=names, use_tqdm=use_tqdm)
    check_presence(model, directory, names)
    return tuple(directory / name for name in names)


def _fetch(model: str, *, revision: str | None, patterns: Sequence[str], use_tqdm: bool) -> Path:
    """Return a hub snapshot with the files that match the patterns, or raise a `ModelError`.

    If the hub doesn't answer, the local cache must have all of these files.
    """
    no_answer = _ask_hub(model, revision)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=no_answer is not None,
                tqdm_class=_Bar if use_tqdm else _NoBar,
            )
        )
    except Exception as error:
        # Network, server and disk raise many kinds of errors. The model can't be loaded after any
        # of them.
        cause = no_answer if isinstance(no_answer, HfHubHTTPError) else error
        raise ModelError(_explain(model, revision, cause)) from error


def _ask_hub(model: str, revision: str | None) -> Exception | None:
    """Return the error of one short request to the hub, or None if the hub answers.

    This precedes each download, which would repeat its requests for half a minute if the hub can't
    be reached.
    """
    try:
        huggingface_hub.model_info(model, revision=revision, timeout=_TIMEOUT_S)
    except Exception as error:  # of many kinds; the cache may have the model all the same
        return error
    return None


def _explain(model: str, revision: str | None, error: Exception) -> str:
    at_revision = "" if revision is None else f" at revision {revision!r}"
    hint = "" if "/" in model else _SHORT_NAME
    match error:
        case HFValidationError():
            return f"{model!r} is neither a directory nor a hub id"
        case RevisionNotFoundError():
            return f"the hub's {model!r} has no revision {revision!r}"
        case GatedRepoError():
            return f"{model!r} is gated: ask for access on its page, then run `hf auth login`"
        case RepositoryNotFoundError():
            seen = "the hub shows you no model of that name"
            return f"there is no directory {model!r}, and {seen}{hint}"
        case IncompleteSnapshotError():
            state = f"{model!r}{at_revision} is only partly in the hub's cache"
        case LocalEntryNotFoundError():
            state = f"{model!r}{at_revision} is neither a directory nor in the hub's cache"
        case _:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"{model!r} can't be fetched: {lines[0]}"
    if huggingface_hub.is_offline_mode():
        return f"{state}, and it can't be fetched in offline mode (HF_HUB_OFFLINE){hint}"
    return f"{state}, and the hub can't be reached{hint}"


class _Bar(tqdm):
    """A progress bar that appears only on a terminal, and only if a download takes long."""

    is_hidden: bool | None = None  # None makes tqdm hide the bar unless it writes to a terminal

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": self.is_hidden, "delay": BAR_DELAY_S})


class _NoBar(_Bar):
    is_hidden = True
