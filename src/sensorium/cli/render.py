"""`sensorium render`: the HTTP server without an engine, which loads no weights."""

from __future__ import annotations

import argparse
from typing import Any

from sensorium.cli.engine_flags import add_prompt_flags, make_engine_kwargs
from sensorium.cli.flags import add_loading_flags, make_loading_kwargs
from sensorium.cli.media_flags import add_media_options
from sensorium.cli.serve import add_model, get_model, make_media, run_server
from sensorium.cli.server_flags import add_server_flags, make_server_kwargs
from sensorium.server.options import ServeOptions

_DESCRIPTION = """Render for a model that runs elsewhere: conversations and prompts in, tokens and
processed media out, over HTTP. Needs a checkpoint's small files only. Signals as for `serve`.
Each frontend has a cache of its own for processed media."""
_EXAMPLES = """examples:
  sensorium render MODEL --port 8001
  sensorium render MODEL --api-server-count 4 --mm-processor-cache-gb 1
"""


def add_command(commands: Any) -> None:
    render = commands.add_parser(
        "render",
        help="render for a model that runs elsewhere, over HTTP",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(render)
    add_server_flags(render, has_engine=False)
    add_loading_flags(render, has_weights=False)
    add_prompt_flags(render.add_argument_group("prompts"))
    add_media_options(render, is_server=True, has_engine=False)
    render.set_defaults(run=run, refuse=render.error)


def run(arguments: argparse.Namespace) -> None:
    run_server(make_options(arguments))


def make_options(arguments: argparse.Namespace) -> ServeOptions:
    """Ends the program with the usage if flags don't go together."""
    model = get_model(arguments)
    return ServeOptions(
        model=model,
        is_render_only=True,
        **make_server_kwargs(arguments),
        loading={"model": model, **make_loading_kwargs(arguments)},
        engine=make_engine_kwargs(arguments),
        media=make_media(arguments),
    )
