"""What `LLM.generate` was called with, as one list of prompts and one of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
import torch

from sensorium.types.errors import RequestError
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text, a mapping or a list of token ids; anything else is many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts are text, token ids, mappings or a list of them, not {type(prompts).__name__}"
        )
    if len(prompts) > 0 and all(isinstance(entry, Integral) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling params are SamplingParams, not {type(params).__name__}")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise RequestError(f"sampling params are SamplingParams, not {type(entry).__name__}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts")
    return list(params)
