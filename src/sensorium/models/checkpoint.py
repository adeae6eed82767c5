"""Finds the directory of a checkpoint, and downloads it from the Hugging Face hub if needed.

It is a local directory, a snapshot in the hub's own cache, or the directory into which the embedded
model was expanded. All files of a model are loaded from this one directory, and so from one
revision. A hub id is looked up once. Its weights are fetched last, by the names in the snapshot's
own index. The many errors of the hub become one sentence each.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.embedded.cache import find_embedded_model
from sensorium.types.errors import ModelError, SensoriumError

BAR_DELAY_S = 1.0
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_TIMEOUT_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_BLOCKS, _BLOCK_BYTES = 64, 4096  # that are read of a file of weights to recognise it
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_CODE_FILES = ("*.py",)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# A safetensors file has 8 bytes with the length of its header (little endian), the header as JSON,
# and the tensors.
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
# Transformers converts these types to the dtype that is asked for. Others stay as they are.
_CONVERTED = frozenset({"F64", "F32", "F16", "BF16"})


@contextmanager
def blame_checkpoint(model: str) -> Iterator[None]:
    """Turn any error inside a `with` into a `ModelError` that names the model.

    Broken files make libraries raise many kinds of errors. Sensorium's own errors are not changed.
    """
    try:
        yield
    except SensoriumError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise ModelError(f"{model[:200]!r} can't be loaded: {reason}") from error


def find_checkpoint(
    model: str, *, revision: str | None, trust_remote_code: bool, use_tqdm: bool
) -> Path:
    """Return a directory with all files of a model but its weights, downloaded if needed.

    `model` is a directory, a hub id, or the name of the embedded model. `revision` is a branch, tag
    or commit of a hub id. Python files are downloaded only with `trust_remote_code`. Raises a
    `ModelError` if the model can't be found.
    """
    if not model:  # an empty path would be the current directory
        raise ModelError("the name of the model is empty: give a directory or a hub id")
    path = Path(model).expanduser()
    is_embedded = model == EMBEDDED_MODEL
    if is_embedded or path.is_dir():
        if revision is not None:
            kind = "the embedded model" if is_embedded else "a directory"
            raise ModelError(f"revision={revision!r} needs a hub id, but {model!r} is {kind}")
        return find_embedded_model() if is_embedded else path
    # A hub id is "name" or "owner/name".
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no directory {model!r}")
    patterns = _SMALL_FILES + (_CODE_FILES if trust_remote_code else ())
    return _fetch(model, revision=revision, patterns=patterns, use_tqdm=use_tqdm)


def get_revision(directory: Path) -> str:
    """Return a text that distinguishes this checkpoint from others of the same name.

    It is the commit of a snapshot in the hub's cache, or else a digest of the directory's
    `config.json`. Without that file it is empty.
    """
    if directory.parent.name == "snapshots":
        return directory.name
    config = directory / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""


def get_weights_identity(directory: Path) -> str:
    """Return a text that differs from that of every checkpoint with other weights.

    It is the commit of a snapshot in the hub's cache. Elsewhere it has the name, the size and the
    time of each file of weights, and a digest of some of its blocks. So a copy of a directory has
    the same identity only if the copy keeps times.
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
    """Return a digest of the beginning of a file and of blocks that are spread over it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(_NUM_BLOCKS):
            file.seek(index * num_bytes // _NUM_BLOCKS)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def find_weights(model: str, directory: Path, *, use_tqdm: bool) -> tuple[Path, ...]:
    """Return the paths of a checkpoint's safetensors files, and download them if they are missing.

    `directory` is the one that `find_checkpoint` returned. Raises a `ModelError` if files are still
    missing afterwards.
    """
    names = _get_weight_names(directory)
    if not Path(model).expanduser().is_dir() and not all(
        (directory / name).is_file() for name in names
    ):
        # The name of a snapshot's directory is its commit.
        _fetch(model, revision=directory.name, patterns=names, use_tqdm=use_tqdm)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing == [WEIGHTS]:
        raise ModelError(f"there are no weights in {str(directory)!r}{_get_hint(directory)}")
    if missing:
        raise ModelError(
            f"the weights of {model!r} are not complete: "
            f"{len(missing)} of {len(names)} files are missing, for example {missing[0]}"
        )
    return tuple(directory / name for name in names)


def _get_weight_names(directory: Path) -> tuple[str, ...]:
    index = directory / WEIGHTS_INDEX
    if (directory / WEIGHTS).is_file() or not index.is_file():
        return (WEIGHTS,)
    try:
        return tuple(sorted(set(json.loads(index.read_text())["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the file {index} is not an index of weights: {error!r}") from error


def _get_hint(directory: Path) -> str:
    """Return the end of the error text for missing weights.

    It mentions pickle files if the directory has any. They are not loaded, because they can run
    code when they are read.
    """
    pickles = [path.name for pattern in _PICKLES for path in sorted(directory.glob(pattern))]
    if not pickles:
        return f": {WEIGHTS} or {WEIGHTS_INDEX} is needed"
    return (
        f" but {pickles[0]}: only safetensors are loaded, because pickles can run code. "
        "Transformers' `save_pretrained` converts them"
    )


def _fetch(model: str, *, revision: str | None, patterns: Sequence[str], use_tqdm: bool) -> Path:
    """Return the directory of a hub snapshot, with the files that match the patterns.

    If the hub doesn't answer, it is the snapshot in the local cache. Raises a `ModelError` if that
    has not all files either.
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
    """Return the error of a single short request to the hub, or None if the hub answers.

    It is made before a download, which would repeat its requests for half a minute if the hub can't
    be reached.
    """
    try:
        huggingface_hub.model_info(model, revision=revision, timeout=_TIMEOUT_S)
    except Exception as error:  # of many kinds; the cache may have the model all the same
        return error
    return None


def _explain(model: str, revision: str | None, error: Exception) -> str:
    at_revision = "" if revision is None else f" at revision {revision!r}"
    match error:
        case HFValidationError():
            return f"{model!r} is neither a directory nor a hub id"
        case RevisionNotFoundError():
            return f"the hub's {model!r} has no revision {revision!r}"
        case GatedRepoError():
            return f"{model!r} is gated: ask for access on its page, then run `hf auth login`"
        case RepositoryNotFoundError():
            return f"there is no directory {model!r}, and the hub shows you no model of that name"
        case IncompleteSnapshotError():
            state = f"{model!r}{at_revision} is only partly in the hub's cache"
        case LocalEntryNotFoundError():
            state = f"{model!r}{at_revision} is neither a directory nor in the hub's cache"
        case _:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"{model!r} can't be fetched: {lines[0]}"
    if huggingface_hub.is_offline_mode():
        return f"{state}, and it can't be fetched in offline mode (HF_HUB_OFFLINE)"
    return f"{state}, and the hub can't be reached"


class _Bar(tqdm):
    """A progress bar that appears only on a terminal, and only if a download takes long."""

    is_hidden: bool | None = None  # None makes tqdm hide the bar unless it writes to a terminal

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": self.is_hidden, "delay": BAR_DELAY_S})


class _NoBar(_Bar):
    is_hidden = True


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist.

    Raises a `ModelError` if the file is not JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def get_num_weight_bytes(paths: Iterable[Path], *, element_size: int) -> int:
    """Return the memory in bytes that the tensors in safetensors files take when they are loaded.

    Floating-point tensors are counted with `element_size` bytes per number, because they are
    converted to one type. Only the headers are read. Raises a `ModelError` for a file that is cut
    short.
    """
    return sum(
        _get_num_bytes(tensor, element_size) for path in paths for tensor in read_tensors(path)
    )


def _get_num_bytes(tensor: dict[str, Any], element_size: int) -> int:
    if tensor["dtype"] in _CONVERTED:
        return math.prod(tensor["shape"]) * element_size
    start, end = tensor["data_offsets"]
    return int(end - start)


def read_tensors(path: Path) -> list[dict[str, Any]]:
    """Return the `dtype`, `shape` and `data_offsets` of each tensor in a safetensors file.

    Raises a `ModelError` if the file is not in this format, or shorter than its header demands.
    """
    num_file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        if header_size > _MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file")
        header = file.read(header_size)
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file, or is cut short: {error}") from error
    expected = _PREFIX_BYTES + header_size + end
    if num_file_bytes < expected:
        raise ModelError(f"{path} is cut short: it has {num_file_bytes} of {expected} bytes")
    return tensors
