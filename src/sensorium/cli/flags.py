"""Flags that several commands have, and what is made of them: an engine, sampling parameters,
media.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.cli.media_flags import make_llm_media
from sensorium.cli.parsing import at_least, between, parse_sizes
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.layers.attention import ATTENTION_BACKENDS
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    from sensorium.engine.llm import LLM

MEDIA_FLAGS = {"image": "an image", "audio": "a sound", "video": "a video"}  # in their order
MODEL_HELP = f"a directory or a hub id (default: {EMBEDDED_MODEL}, which comes with the package)"
_URL_SCHEMES = ("http:", "https:", "data:", "file:")


def add_loading_flags(command: argparse.ArgumentParser, *, has_weights: bool = True) -> None:
    """Add the flags for loading a model, with `has_weights` also those for its weights."""
    group = command.add_argument_group("loading")
    group.add_argument(
        "--max-model-len",
        type=at_least(1),
        metavar="N",
        help="context length in tokens (default: the model's)",
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id (default: main)")
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that the checkpoint brings (default: refuse such a model)",
    )
    if has_weights:
        _add_weights(group)


def _add_weights(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="precision of the weights (default auto: the checkpoint's, on most CPUs float32)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu or cuda")
    group.add_argument(
        "--attention-backend",
        default="auto",
        choices=ATTENTION_BACKENDS,
        help="kernels that attend to the KV cache (default auto: the first of these that runs the "
        "model here and passes a trial); docs/gpu.md says what each needs",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="launch every kernel of a step instead of replaying CUDA graphs",
    )
    group.add_argument(
        "--fusion",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute norms, rotary positions, gated layers and joined products in fewer kernels, "
        "where they agree with the model's own (default: yes, on CUDA)",
    )
    group.add_argument(
        "--cuda-graph-sizes",
        type=parse_sizes,
        metavar="N,N,...",
        help="batch sizes for which steps that decode have a CUDA graph; a batch is padded to the "
        "next size, and a larger one runs without a graph (default: 1,2,4,8, then every eighth up "
        "to --max-num-seqs)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=between(0.01, 1),
        default=0.9,
        metavar="SHARE",
        help="share of a CUDA device's memory that may be in use (default 0.9)",
    )


def make_loading_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """How a model is loaded, but for what its engine needs: keywords of `builder.Source`."""
    names = ("dtype", "device", "revision", "trust_remote_code")
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def load_llm(arguments: argparse.Namespace) -> LLM:
    from sensorium.engine.llm import LLM

    return LLM(
        arguments.model,
        max_model_len=arguments.max_model_len,
        attention_backend=arguments.attention_backend,
        enforce_eager=arguments.enforce_eager,
        fusion=arguments.fusion,
        cuda_graph_sizes=arguments.cuda_graph_sizes,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        **make_loading_kwargs(arguments),
        **make_llm_media(arguments),
    )


def add_sampling_flags(command: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = command.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"new tokens (default {max_tokens})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        help="0: greedy (default: what the model's generation config says)",
    )
    group.add_argument("--top-p", type=float, help="share of probability to choose from")
    group.add_argument("--top-k", type=int, help="number of tokens to choose from; 0: all")
    group.add_argument("--min-p", type=float, help="least share of the likeliest's probability")
    group.add_argument(
        "--repetition-penalty", type=float, help="above 1: fewer tokens of prompt and answer again"
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="above 0: discourage tokens that the answer has already",
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="the same, once for each occurrence"
    )
    group.add_argument("--seed", type=int, help="makes sampling repeatable")
    group.add_argument(
        "--stop", action="append", default=[], help="end before this text; may be repeated"
    )


def make_sampling_params(arguments: argparse.Namespace, *, n: int = 1) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        n=n,
        seed=arguments.seed,
        stop=arguments.stop,
    )


def add_media_flags(command: argparse.ArgumentParser, purpose: str) -> None:
    for modality, noun in MEDIA_FLAGS.items():
        command.add_argument(
            f"--{modality}",
            action="append",
            default=[],
            metavar="FILE|URL",
            help=f"{noun} {purpose}; may be repeated",
        )


def read_media(source: str) -> bytes | str:
    """A file's bytes; a URL as it is."""
    if source.lower().startswith(_URL_SCHEMES):
        return source
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"{source}: {reason}") from error
