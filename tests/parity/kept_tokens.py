"""Tokens that `generate` gave before, kept in files of this repository.

`tests/references/MACHINE/FAMILY.json` maps a digest of everything that `generate` is given (each
tensor of the processor's output, the options, the generation config) to the tokens that it
returned. The engine under test never writes there.

1. A file counts only for the torch, the Transformers, the machine type and the tiny model that it
   was written with. Otherwise, and for a digest that is not in it, tokens are computed.
2. About a tenth of what is asked for is computed nevertheless, another tenth at every commit.
   Tokens that differ from those in the file fail the test.
3. `--references=fresh` computes and compares everything; `--references=write` writes the files.
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "references" / platform.machine()
_CHECKED_SHARE = 10  # one in so many is computed though it is kept


class KeptTokens:
    """The kept tokens of one family."""

    def __init__(self, family: str, directory: str, *, mode: str, folder: Path = FOLDER) -> None:
        self._path = folder / f"{family}.json"
        self._mode = mode
        self._key = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": digest_model(Path(directory)),
        }
        self._kept = {} if mode == "write" else self._read()
        self._computed: dict[str, list[int]] = {}

    def get(self, digest: str, compute: Callable[[], list[int]]) -> list[int]:
        """Return the tokens of what has this digest. Raise if `generate` gives others by now."""
        kept = self._kept.get(digest)
        if kept is not None and self._mode == "kept" and not is_checked(digest):
            return kept
        if digest not in self._computed:
            self.check(digest, compute())
        return self._computed[digest]

    def check(self, digest: str, token_ids: list[int]) -> None:
        """Compare computed tokens with the kept ones, if there are any, and remember them."""
        kept = self._kept.get(digest, token_ids)
        if kept != token_ids:
            raise AssertionError(
                f"{self._path}: {digest} is kept as {kept}, but `generate` gives {token_ids}. "
                "If a change of the reference is meant, run `make references`."
            )
        self._computed[digest] = token_ids

    def write(self) -> None:
        """Add what was computed to the file. Several processes may do so at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            tokens = {**self._read(), **self._computed}
            lines = ",\n".join(
                f'  "{digest}": {json.dumps(token_ids, separators=(",", ":"))}'
                for digest, token_ids in sorted(tokens.items())
            )
            file.truncate(0)
            file.write(f'{{\n "key": {json.dumps(self._key)},\n "tokens": {{\n{lines}\n }}\n}}\n')

    def _read(self) -> dict[str, list[int]]:
        """Return digest -> tokens, or nothing if the file is for another model or version."""
        if not self._path.exists() or not (text := self._path.read_text()):
            return {}
        content = json.loads(text)
        tokens: dict[str, list[int]] = content["tokens"]
        return tokens if content["key"] == self._key else {}


def is_checked(digest: str, commit: str | None = None) -> bool:
    """Return whether kept tokens are computed again, by a draw that every commit makes anew."""
    drawn = _digest([(commit or get_commit()).encode(), digest.encode()])
    return int(drawn, 16) % _CHECKED_SHARE == 0


@cache
def get_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


@cache
def digest_model(directory: Path) -> str:
    """Return a digest of the configuration and the weights of a checkpoint."""
    paths = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    return _digest(path.read_bytes() for path in paths)


def digest_question(
    directory: Path, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> str:
    """Return a digest of all but the model that decides which tokens `generate` returns."""
    parts = [(directory / "generation_config.json").read_bytes()]
    parts.append(json.dumps(options, sort_keys=True).encode())
    for name, value in sorted(inputs.items()):
        tensor = torch.as_tensor(value).contiguous()
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        parts.append(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return _digest(parts)


def _digest(parts: Iterable[bytes]) -> str:
    """Return a digest that distinguishes parts that are equal when they are joined."""
    hasher = blake2b(digest_size=10)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()
