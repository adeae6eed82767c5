"""The trial of unknown models on the device: right ones pass by far, a mistake does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import sensorium.engine.assembly.builder as builder
import sensorium.models.families as families
from sensorium.models.hf_model import HfModel

from .setting import make_device_llm

_LOGGER = logging.getLogger("sensorium.engine.assembly.trial")
# Half of what is allowed, and the least that rounding counts for.
_OVERALL, _WORST = 1.25, 2.5
_LEAST = {torch.float32: 1e-4, torch.bfloat16: 2e-3}


class _Notes(logging.Handler):
    """Keeps the figures of each trial: distances overall and at worst, of ours and of rounding."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.figures: list[tuple[float, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.getMessage().startswith("trial of"):
            self.figures.append(record.args[1:5])  # type: ignore[arg-type]


@contextmanager
def _trying_all() -> Iterator[_Notes]:
    notes = _Notes()
    _LOGGER.addHandler(notes)
    _LOGGER.setLevel(logging.INFO)
    try:
        with (
            mock.patch.object(builder, "KNOWN_MODELS", {}),
            mock.patch.object(families, "KNOWN_MODELS", {}),
        ):
            yield notes
    finally:
        _LOGGER.removeHandler(notes)


def check_trial(name: str, dtype: torch.dtype, backend: str) -> str:
    with _trying_all() as notes:
        llm = make_device_llm(name, dtype, attention_backend=backend)
    assert llm.input_processor.switched_off.reasons == {}
    assert notes.figures
    for overall, worst, rounding, worst_rounding in notes.figures:
        assert overall <= _OVERALL * max(rounding, _LEAST[dtype]), notes.figures
        assert worst <= _WORST * max(worst_rounding, _LEAST[dtype]), notes.figures
    ratios = [f"{a / c:.2f}/{b / d:.2f}" for a, b, c, d in notes.figures if c and d]
    return f"times rounding, overall/worst: {', '.join(ratios)}"


def check_trial_control(name: str, dtype: torch.dtype) -> str:
    """Rows of pictures that come in the wrong order are found."""
    encode = HfModel.encode

    def roll(hf_model: HfModel, *arguments: Any) -> list[torch.Tensor]:
        return [embeds.roll(1, 0) for embeds in encode(hf_model, *arguments)]

    with _trying_all() as notes, mock.patch.object(HfModel, "encode", roll):
        llm = make_device_llm(name, dtype)
    assert "image" in llm.input_processor.switched_off.reasons
    _, worst, _, worst_rounding = notes.figures[1]
    return f"{worst / worst_rounding:.0f} times the rounding of the worst position"
