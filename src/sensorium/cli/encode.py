"""The command `encode`, which runs the encoders of a model in a process of their own."""

from __future__ import annotations

import argparse
from typing import Any

from sensorium.cli.flags import add_server_command, get_given, look_at_model, tell_notes
from sensorium.cli.serve import choose_pool_size, count_cores, get_model
from sensorium.engine.assembly.options import EncodeOptions, LoadingOptions, MediaOptions
from sensorium.multimodal.media import MediaLimits
from sensorium.server.options import ServeOptions
from sensorium.types.errors import SensoriumError

_ENCODE = """Run only the encoders of a model, for engines on the same machine. An engine sends
large media here (sensorium serve --encoder unix:PATH) and gets embeddings back through shared
memory. Several engines may share one encoder: equal media is encoded once. Give both the same
options of media. After SIGTERM or Ctrl-C items in flight are finished, and the socket is removed.
"""
_EXAMPLES = """examples:
  sensorium encode MODEL --socket /run/user/1000/encoder.sock
  sensorium serve MODEL --encoder unix:/run/user/1000/encoder.sock --encode-above 256K
"""


def add_encode(commands: Any) -> None:
    add_server_command(
        commands,
        "encode",
        *(EncodeOptions, LoadingOptions, MediaOptions, MediaLimits, ServeOptions),
        summary="run only the encoders of a model, for engines on this machine",
        description=_ENCODE,
        examples=_EXAMPLES,
        run=_encode,
    )


def _encode(arguments: argparse.Namespace) -> None:
    from sensorium.server.encoder import EncoderProcessOptions, run_encoder
    from sensorium.server.logs import set_up_logging

    logging = get_given(arguments, ServeOptions)
    try:
        limits = MediaLimits(**get_given(arguments, MediaLimits))
        media: dict[str, Any] = {"mm_processor_pool_size": choose_pool_size(1, count_cores())}
        media |= get_given(arguments, MediaOptions)
        options = EncoderProcessOptions(
            encode=EncodeOptions(**get_given(arguments, EncodeOptions)),
            loading=LoadingOptions(
                **get_given(arguments, LoadingOptions) | {"model": get_model(arguments)}
            ),
            media=MediaOptions(**media, media_limits=limits),
            log_format=logging.get("log_format", "text"),
        )
    except SensoriumError as error:
        arguments.refuse(str(error))
        raise
    set_up_logging(
        "encoder", log_format=options.log_format, log_level=logging.get("log_level", "info")
    )
    tell_notes(arguments, options.log_format)
    look_at_model(options.loading.model, arguments)
    run_encoder(options)
