"""What a server that only renders knows without a model: what a core would say of itself."""

from __future__ import annotations

from sensorium.engine.build.builder import LoadedConfig
from sensorium.engine.build.config import EngineOptions, resolve_context
from sensorium.engine.core_process.core_info import CoreInfo
from sensorium.models.families import FAMILIES
from sensorium.models.generation_config import load_generation_defaults
from sensorium.server.options import ServeOptions
from sensorium.server.processes.announcement import describe_model


def make_render_info(
    options: ServeOptions, engine_options: EngineOptions, loaded: LoadedConfig
) -> CoreInfo:
    """From the checkpoint's small files. A core may have had to cut its context to what fits into
    its memory: then both servers are told by `max_model_len`.
    """
    hf_config = loaded.hf_config
    text_config = hf_config.get_text_config(decoder=True)
    max_model_len = resolve_context(engine_options, text_config=text_config)
    names = {family.model_type: family.name for family in FAMILIES}
    defaults = load_generation_defaults(str(loaded.checkpoint), options.generation_config)
    return CoreInfo(
        endpoint="",
        max_model_len=max_model_len,
        defaults=defaults,
        description=(
            ("model", describe_model(options)),
            ("family", names.get(hf_config.model_type, f"{hf_config.model_type} (unknown)")),
            ("engine", "none: this server renders, and loads no weights"),
            ("context", f"{max_model_len} tokens"),
        ),
    )
