"""What is known of a core that is ready. Free of torch: the parent of all processes has it too."""

from __future__ import annotations

import msgspec

from sensorium.types.sampling import GenerationDefaults


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend has to know of a core. `epoch`: of its half of the mirrored cache, if it has
    one. `description`: what was resolved, as pairs of words for people. `kernels`: by what a step
    is computed.
    """

    endpoint: str
    max_model_len: int
    defaults: GenerationDefaults
    epoch: int | None = None
    description: tuple[tuple[str, str], ...] = ()
    kernels: dict[str, str] = {}
    switched_off: dict[str, str] = {}  # modality -> why the core's trial refused it
