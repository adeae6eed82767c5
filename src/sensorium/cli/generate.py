"""The command `sensorium generate`, which continues prompts in a batch, without a template."""

from __future__ import annotations

import argparse
from typing import Any

from sensorium.cli.flags import (
    ENGINE_GROUPS,
    MEDIA_FLAGS,
    MODEL_HELP,
    add_media_flags,
    add_options,
    add_quiet,
    add_sampling_flags,
    add_words,
    load_llm,
    make_sampling_params,
    read_media,
    split_prompts,
)
from sensorium.types.errors import RequestError
from sensorium.types.request import TextPrompt


def add_command(commands: Any) -> None:
    """Add the command `generate`."""
    generate = commands.add_parser(
        "generate",
        help="generate from prompts, in this process",
        description="Generate from one or more prompts, batched, and print the answers. "
        "Prompts are taken as they are: no chat template is applied (`sensorium chat` does).",
    )
    add_words(
        generate,
        "PROMPT",
        f"{MODEL_HELP} Then prompts: text, with the model's marker for each media item. A single "
        "word is a prompt.",
    )
    add_media_flags(generate, "for the prompt's markers, in order (one prompt only)")
    add_quiet(generate)
    add_sampling_flags(generate, max_tokens=64, has_n=True)
    add_options(generate, "generate", *ENGINE_GROUPS)
    generate.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    arguments.model, texts = split_prompts(arguments.words)
    if not texts:
        arguments.refuse("there is no prompt")
    params = make_sampling_params(arguments)
    given = [modality for modality in MEDIA_FLAGS if getattr(arguments, modality)]
    if given and len(texts) > 1:
        raise RequestError(f"--{given[0]} goes with one prompt only")
    media = {
        modality: [read_media(source) for source in getattr(arguments, modality)]
        for modality in given
    }
    prompts: list[TextPrompt] = [{"prompt": text, "multi_modal_data": media} for text in texts]
    with load_llm(arguments) as llm:
        for output in llm.generate(prompts, params, use_tqdm=len(prompts) > 1):
            for completion in output.outputs:
                print(completion.text)
