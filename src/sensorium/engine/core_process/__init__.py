"""The core, its process, and its description for other processes.

This file does not import torch, because the parent of all processes also reads the description.
"""

from __future__ import annotations

import msgspec

from sensorium.types.restrictions import Restrictions
from sensorium.types.sampling import GenerationDefaults


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a running core, which every frontend gets before it connects."""

    endpoint: str
    max_model_len: int
    defaults: GenerationDefaults
    epoch: int | None = None  # of the core's half of the mirrored cache; None if it has none
    description: tuple[tuple[str, str], ...] = ()  # names and values of its configuration
    kernels: dict[str, str] = {}  # part of a step -> implementation that computes it
    restrictions: Restrictions = Restrictions()  # modalities that the model's trial ruled out
