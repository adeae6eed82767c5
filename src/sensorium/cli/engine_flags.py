"""Flags about the engine's room: requests, tokens, blocks, caches."""

from __future__ import annotations

import argparse
from typing import Any

from sensorium.cli.parsing import MAX_INTEGER, at_least, parse_bytes, parse_counts

_NAMES = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "encoder_cache_size",
    "max_num_encoder_embeds",
    "block_size",
    "enable_prefix_caching",
    "disable_chunked_mm_input",
    "scheduling_policy",
    "attention_backend",
    "enforce_eager",
    "fusion",
    "cuda_graph_sizes",
    "limit_mm_per_prompt",
    "gpu_memory_utilization",
    "structured_string_limit",
    "seed",
)


def add_engine_flags(command: argparse.ArgumentParser) -> None:
    """Beside those of `add_loading_flags`."""
    group = command.add_argument_group("engine")
    _add_counts(group)
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="for keys and values, e.g. 4G (default: all requests at full length, if it is free)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the blocks of earlier prompts (default: yes)",
    )
    group.add_argument(
        "--disable-chunked-mm-input",
        action="store_true",
        help="compute all tokens of a media item in one step",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=["fcfs", "priority"],
        default="fcfs",
        help="who goes first: who came first, or the lower priority (default fcfs)",
    )
    add_prompt_flags(group)


def add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    """Those that need no engine."""
    group.add_argument(
        "--limit-mm-per-prompt",
        type=parse_counts,
        default={},
        metavar="COUNTS",
        help="most items in one prompt, as JSON or image=4,video=1 (default: no limit)",
    )
    group.add_argument(
        "--structured-string-limit",
        type=at_least(0),
        metavar="N",
        help="bound answers that follow a JSON schema: strings that it leaves free have at most N "
        "characters, and numbers and lists are bounded too; 0: no limit (default: what the model's "
        "generation_config.json says, which is no limit for most models)",
    )
    group.add_argument(
        "--seed",
        type=at_least(-MAX_INTEGER),
        default=0,
        help="where requests without a seed get theirs from (default 0)",
    )


def _add_counts(group: argparse._ArgumentGroup) -> None:
    for name, purpose in (
        ("--max-num-seqs", "requests in a step (default: 32 on a CPU, 256 on CUDA)"),
        ("--max-num-batched-tokens", "tokens in a step (default: 2048 on a CPU, 8192 on CUDA)"),
        ("--encoder-cache-size", "embeddings of media that are kept (default 16384)"),
        ("--max-num-encoder-embeds", "embeddings of media in a step (default: as tokens)"),
    ):
        group.add_argument(name, type=at_least(1), metavar="N", help=purpose)
    group.add_argument(
        "--block-size",
        type=at_least(1),
        default=16,
        metavar="N",
        help="tokens in a block of the KV cache (default 16)",
    )


def make_engine_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `EngineOptions`, those among the flags of loading too."""
    return {name: getattr(arguments, name) for name in _NAMES if hasattr(arguments, name)}
