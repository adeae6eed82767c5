"""`sensorium models`: the families that are known, or what one model takes and needs."""

from __future__ import annotations

import argparse
from typing import Any

from sensorium.embedded import EMBEDDED_MODEL

_DEFAULT = (
    f"Commands that are told no model use {EMBEDDED_MODEL}, which comes with the package: "
    f"`sensorium models {EMBEDDED_MODEL}`."
)


def add_command(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list the model families, or describe one model",
        description="List the families that are known, with what they take and their limits. "
        "With a model: what it takes and needs, what is switched off, or why it can't be run.",
    )
    models.add_argument("model", nargs="?", help=f"a directory, a hub id or {EMBEDDED_MODEL}")
    models.add_argument("--revision", help="branch, tag or commit of a hub id (default: main)")
    models.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )
    models.add_argument(
        "--try",
        action="store_true",
        dest="is_tried",
        help="load the weights and, for a type that is not in the list, run the trial of a start: "
        "what it would switch off is shown (default: weights are not read)",
    )
    models.set_defaults(run=_show_models)


def _show_models(arguments: argparse.Namespace) -> None:
    from sensorium.engine.build.builder import Source
    from sensorium.engine.build.catalog import (
        HEADER,
        OTHERS,
        describe_model,
        format_table,
        get_rows,
    )
    from sensorium.models.checkpoint import blame_checkpoint

    if arguments.model is None:
        print(format_table(get_rows(), HEADER), OTHERS, _DEFAULT, sep="\n\n")
        return
    with blame_checkpoint(arguments.model):
        source = Source(
            model=arguments.model,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        )
        text = describe_model(source, is_tried=arguments.is_tried)
    print(text)
