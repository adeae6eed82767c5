"""What the checks on a GPU share: models, references and backends on that device.

No pytest here: `run.py` runs the checks on machines that have none.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version

from sensorium import LLM, ModelError
from tests.parity.reference import Reference
from tests.support.engine import make_llm

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
TINY_MODELS = ROOT / "build" / "tiny-models"
# Families that also have models with heads of 64: kernels don't have the 16 of the others.
WIDE_FAMILIES = ("llama", "llava", "qwen2_5_vl", "gemma3")
_WIDE = "wide-"


class UnavailableError(Exception):
    """This machine can't run the check, and why."""


def raise_unavailable(error: ModelError) -> NoReturn:
    """For a backend that can't be had. One that failed its trial is no lack but a fault."""
    if "attention_backend=" in str(error) and "a trial" not in str(error):
        raise UnavailableError(str(error)) from error
    raise error


@cache
def get_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def need_cuda() -> None:
    if get_device() != "cuda":
        raise UnavailableError("needs a CUDA device")


def use_exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@cache
def get_directory(name: str) -> str:
    """The tiny model of a family, or the one with wide heads (`wide-` before the family)."""
    if name == "llava_onevision" and Version(transformers.__version__) < Version("5.22"):
        raise UnavailableError(f"transformers {transformers.__version__}: another way with videos")
    try:
        if name.startswith(_WIDE):
            return str(_make_wide(name.removeprefix(_WIDE)))
        from make_tiny_models import make_family

        return str(make_family(name, TINY_MODELS))
    except (AttributeError, ImportError) as error:
        raise UnavailableError(f"transformers {transformers.__version__}: {error}") from error


def get_family(name: str) -> str:
    return name.removeprefix(_WIDE)


def _make_wide(family: str) -> Path:
    """The family's tiny model with heads of 64, its processor unchanged."""
    directory = TINY_MODELS / f"{_WIDE}{family}"
    if (directory / "done").exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(get_directory(family), directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "head_dim", None):
        text_config.head_dim = 64
    else:  # the size is hidden / heads
        text_config.num_attention_heads = text_config.num_key_value_heads = (
            text_config.hidden_size // 64
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = [4 * size for size in rope["mrope_section"]]
    from tiny_models.building import rescale

    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config)
    std = 0.02 if family.startswith("gemma") else 1.0  # as in the script
    rescale(model, embedding_std=std).save_pretrained(directory)
    (directory / "done").touch()
    return directory


class DeviceReference(Reference):
    """Transformers on the device, in one dtype."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(get_directory(name), get_family(name))
        self._dtype = dtype

    @cached_property
    def model(self) -> Any:
        # Not `.to(dtype)`: that would also round the frequencies of rotary embeddings.
        return self._load(self._dtype).to(get_device())

    def _prepare(self, *arguments: Any) -> tuple[str, Mapping[str, torch.Tensor]]:
        text, inputs = super()._prepare(*arguments)
        return text, {name: self._move(name, tensor) for name, tensor in inputs.items()}

    def generate(self, inputs: Mapping[str, torch.Tensor], **options: Any) -> Any:
        return super().generate(
            {name: self._move(name, tensor) for name, tensor in inputs.items()}, **options
        )

    def _move(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As users do: `inputs.to(device, dtype)`, but times stay exact."""
        moved = tensor.to(get_device())
        is_rounded = moved.is_floating_point() and "second" not in name
        return moved.to(self.model.dtype) if is_rounded else moved


@cache
def get_reference(name: str, dtype: torch.dtype) -> DeviceReference:
    use_exact_float32()
    return DeviceReference(name, dtype)


def make_device_llm(name: str, dtype: torch.dtype, **options: Any) -> LLM:
    """Make an engine, or raise `UnavailableError` if its attention backend can't be had."""
    values = {"device": get_device(), "dtype": str(dtype).removeprefix("torch.")}
    logging.getLogger("sensorium").setLevel(logging.WARNING)
    try:
        return make_llm(get_directory(name), **{**values, **options})
    except ModelError as error:
        raise_unavailable(error)
