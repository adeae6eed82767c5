"""The command `sensorium models`, which lists model families (architectures) or describes a model.

The list is printed without torch and Transformers, which take seconds to import.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from sensorium.cli.flags import add_quiet, look_at_model, showing_progress
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.types.families import FAMILIES

HEADER = ("family", "model_type", "besides text", "code of its own", "what is special", "limits")
OTHERS = (
    "Models of other types run through the same generic code, if their decoder uses Transformers'\n"
    "attention interface and a trial at start agrees with the model on its own. If the trial of\n"
    "text disagrees, the start fails. If that of a modality disagrees, the modality is switched\n"
    "off, or limited to one item a prompt if that agrees. Audio that such a model would not\n"
    "process to its end is refused."
)
_DEFAULT = (
    f"Commands use {EMBEDDED_MODEL}, which comes with the package, unless they are given another "
    f"model: `sensorium models {EMBEDDED_MODEL}`."
)


def add_models(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list the model families, or describe one model",
        description="List the families that are known, with what they take and their limits. "
        "With a model: what it takes and needs, what is switched off, or why it can't be run.",
    )
    models.add_argument("model", nargs="?", help=f"A directory, a hub id or {EMBEDDED_MODEL}.")
    models.add_argument("--revision", help="The branch, tag or commit of a hub id. Default: main.")
    models.add_argument(
        "--trust-remote-code", action="store_true", help="Run code that comes with the model."
    )
    models.add_argument(
        "--try",
        action="store_true",
        dest="is_tried",
        help="Load the weights and, for a type that is not in the list, run the trial of a start, "
        "and show what it would switch off. Without it no weights are read.",
    )
    add_quiet(models)
    models.set_defaults(run=_show_models)


def _show_models(arguments: argparse.Namespace) -> None:
    if arguments.model is None:
        print(format_table(get_rows(), HEADER), OTHERS, _DEFAULT, sep="\n\n")
        return
    look_at_model(arguments.model, arguments, needs_weights=arguments.is_tried)
    with showing_progress(arguments):
        from sensorium.engine.assembly.catalog import describe_model
        from sensorium.engine.assembly.options import LoadingOptions
        from sensorium.models.checkpoint import blame_checkpoint

        with blame_checkpoint(arguments.model):
            loading = LoadingOptions(
                model=arguments.model,
                revision=arguments.revision,
                trust_remote_code=arguments.trust_remote_code,
            )
            text = describe_model(loading, is_tried=arguments.is_tried)
    print(text)


def get_rows() -> list[tuple[str, ...]]:
    return [
        (
            family.name,
            family.model_type,
            ", ".join(family.modalities) or "-",
            ", ".join(family.own_code) or "none",
            family.special or "-",
            family.limits or "-",
        )
        for family in FAMILIES
    ]


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Return rows under a header as a text table; each column is as wide as its longest cell."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
