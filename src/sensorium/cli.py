"""The `sensorium` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import sensorium
from sensorium.types.errors import SensoriumError
from sensorium.types.prompts import TextPrompt


def main() -> None:
    arguments = _make_parser().parse_args()
    try:
        arguments.run(arguments)
    except SensoriumError as error:
        sys.exit(f"sensorium: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sensorium", description="Multimodal LLM inference: everything is perceived once."
    )
    parser.add_argument("--version", action="version", version=f"sensorium {sensorium.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_models(commands)
    generate = commands.add_parser(
        "generate",
        help="generate from prompts, in this process",
        description="Generate from one or more prompts, batched, and print the answers. "
        "Prompts are taken as they are: no chat template is applied.",
    )
    generate.add_argument("model", help="a directory or a hub id")
    generate.add_argument("prompt", nargs="+", help="text, with the model's marker for each image")
    generate.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="an image for the prompt's markers, in order; may be repeated (one prompt only)",
    )
    generate.add_argument("--max-tokens", type=int, default=64, help="new tokens (default 64)")
    generate.add_argument(
        "--temperature",
        type=float,
        help="0: greedy (default: what the model's generation config says)",
    )
    generate.add_argument("--top-p", type=float, help="share of probability to choose from")
    generate.add_argument("--top-k", type=int, help="number of tokens to choose from; 0: all")
    generate.add_argument("--min-p", type=float, help="least share of the likeliest's probability")
    generate.add_argument(
        "--repetition-penalty", type=float, help="above 1: fewer tokens of prompt and answer again"
    )
    generate.add_argument(
        "--presence-penalty", type=float, default=0.0, help="above 0: fewer tokens of the answer"
    )
    generate.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="the same, for each occurrence"
    )
    generate.add_argument("--n", type=int, default=1, help="answers to each prompt (default 1)")
    generate.add_argument("--seed", type=int, help="makes sampling repeatable")
    generate.add_argument(
        "--stop", action="append", default=[], help="end before this text; may be repeated"
    )
    _add_loading_flags(generate)
    generate.set_defaults(run=_generate)
    return parser


def _add_models(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list the model families, or describe one model",
        description="List the families that are known, with what they take and their limits. "
        "With a model: what it takes and needs, or why it can't be run; its weights are not read.",
    )
    models.add_argument("model", nargs="?", help="a directory or a hub id")
    models.add_argument("--revision", help="branch, tag or commit of a hub id (default: main)")
    models.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )
    models.set_defaults(run=_show_models)


def _show_models(arguments: argparse.Namespace) -> None:
    from sensorium.engine.catalog import HEADER, OTHERS, describe_model, format_table, get_rows
    from sensorium.models.checkpoint import blame_checkpoint

    if arguments.model is None:
        print(format_table(get_rows(), HEADER), OTHERS, sep="\n\n")
        return
    with blame_checkpoint(arguments.model):
        text = describe_model(
            arguments.model,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        )
    print(text)


def _add_loading_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-model-len", type=int, help="context length (default: the model's)")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    command.add_argument("--device", default="auto", help="auto, cpu or cuda")
    command.add_argument(
        "--attention-backend", default="auto", help="auto, flashinfer, varlen or torch"
    )
    command.add_argument("--revision", help="branch, tag or commit of a hub id (default: main)")
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that the checkpoint brings (default: refuse such a model)",
    )
    command.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of a CUDA device's memory that may be in use (default 0.9)",
    )


def _generate(arguments: argparse.Namespace) -> None:
    from PIL import Image, ImageOps, UnidentifiedImageError

    from sensorium.engine.llm import LLM

    if arguments.image and len(arguments.prompt) > 1:
        raise sensorium.RequestError("--image goes with one prompt only")
    params = sensorium.SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        n=arguments.n,
        seed=arguments.seed,
        stop=arguments.stop,
    )
    try:
        images = [
            ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in arguments.image
        ]
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise sensorium.RequestError(f"an image can't be read: {error}") from error
    llm = LLM(
        arguments.model,
        max_model_len=arguments.max_model_len,
        dtype=arguments.dtype,
        device=arguments.device,
        attention_backend=arguments.attention_backend,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    prompts: list[TextPrompt] = [
        {"prompt": text, "multi_modal_data": {"image": images}} for text in arguments.prompt
    ]
    for output in llm.generate(prompts, params, use_tqdm=len(prompts) > 1):
        for completion in output.outputs:
            print(completion.text)
