"""The list of all checks on a GPU.

A check returns what it saw, raises `AssertionError` when that is wrong, and `UnavailableError` when
the machine lacks what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tests.parity.cases import FAMILIES, MULTIMODAL_FAMILIES
from tests.parity.ctc_transducer_reference import FAMILIES as RECOGNISERS
from tests.parity.graph_mistakes import GRAPH_MISTAKES
from tests.parity.speaking import FAMILIES as SPEECH_FAMILIES

from .check_attention import check_backend
from .check_bfloat16 import check_decoder, check_embeddings
from .check_controls import MISTAKES, check_control
from .check_fusion import check_compiled_kernels, check_fused_memory
from .check_speech import (
    SPEECH_SETTINGS,
    check_ctc_transducer,
    check_speech_tokens,
    check_transcripts,
)
from .check_streams import check_streams
from .check_structured import check_structured_answers, check_structured_syncs
from .check_syncs import check_decode_syncs, check_encoder_syncs
from .check_tiers import check_remote_encoder, check_restart
from .check_tokens import (
    SETTINGS,
    check_encoder_graphs,
    check_float32,
    check_graph_mistake,
    check_stress,
)
from .check_trial import check_trial, check_trial_control
from .setting import WIDE_FAMILIES

RESTARTED = {"qwen2_5_vl": "float32", "qwen3_vl": "float32", "llava": "bfloat16"}
BACKENDS = ("torch", "triton", "flashinfer", "varlen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    run: Callable[[], str]


def get_checks() -> Iterator[Check]:
    """Those that compile kernels first, and least last: a time limit then costs the least."""
    yield from _get_attention_checks()
    for family in FAMILIES:
        for setting in SETTINGS:
            yield Check(
                name=f"float32 tokens/{family}/{setting}",
                run=partial(check_float32, family, setting),
            )
    for family in SPEECH_FAMILIES:
        for setting in SPEECH_SETTINGS:
            yield Check(
                name=f"speech/{family}/{setting}", run=partial(check_speech_tokens, family, setting)
            )
    yield Check(name="speech/transcripts", run=check_transcripts)
    for family in RECOGNISERS:
        yield Check(name=f"speech/{family}", run=partial(check_ctc_transducer, family))
    yield from _get_state_checks()
    for family in MULTIMODAL_FAMILIES:
        yield Check(name=f"encoder graphs/{family}", run=partial(check_encoder_graphs, family))
    for family in ("llama", "gemma3", "qwen2_5_vl"):
        yield Check(name=f"float32 stress/{family}", run=partial(check_stress, family))
    for mistake in GRAPH_MISTAKES:
        yield Check(name=f"float32 control/{mistake}", run=partial(check_graph_mistake, mistake))
    yield Check(name="fusion/memory", run=check_fused_memory)
    yield Check(name="fusion/compiled kernels", run=check_compiled_kernels)
    yield from _get_bfloat16_checks()
    yield from _get_trial_checks()
    yield from _get_sync_checks()


def _get_state_checks() -> Iterator[Check]:
    """Yield the checks of what outlives a step: streaming audio, and the disk cache."""
    for overlap in (False, True):
        words = "overlap" if overlap else "no overlap"
        yield Check(name=f"streams/{words}", run=partial(check_streams, overlap))
    for family, dtype in (
        ("qwen2_5_vl", "float32"),
        ("qwen3_vl", "float32"),
        ("llava", "bfloat16"),
    ):
        yield Check(name=f"disk cache/{family}", run=partial(check_restart, family, dtype))
        yield Check(
            name=f"remote encoder/{family}", run=partial(check_remote_encoder, family, dtype)
        )


def _get_attention_checks() -> Iterator[Check]:
    settings = [
        ("torch", torch.float32, 16, 16),
        ("torch", torch.float32, 128, 4),
        ("torch", torch.bfloat16, 128, 16),
        ("triton", torch.float32, 16, 16),
        ("triton", torch.float32, 80, 4),
        ("triton", torch.bfloat16, 64, 1),
        ("triton", torch.bfloat16, 128, 16),
        ("triton", torch.float16, 256, 16),
        ("triton", torch.bfloat16, 512, 16),
        ("flashinfer", torch.bfloat16, 64, 16),
        ("flashinfer", torch.bfloat16, 64, 1),
        ("flashinfer", torch.bfloat16, 128, 16),
        ("flashinfer", torch.float16, 128, 16),
        ("flashinfer", torch.bfloat16, 256, 16),
        ("flashinfer", torch.bfloat16, 512, 16),
        ("varlen", torch.bfloat16, 64, 16),
        ("varlen", torch.bfloat16, 128, 16),
        ("varlen", torch.bfloat16, 128, 256),
    ]
    for name, dtype, head_dim, block_size in settings:
        yield Check(
            name=f"attention/{name}/{_name(dtype)}/head {head_dim}/block {block_size}",
            run=partial(check_backend, name, dtype, head_dim, block_size),
        )


def _get_bfloat16_checks() -> Iterator[Check]:
    wide = [f"wide-{family}" for family in WIDE_FAMILIES]
    for family in MULTIMODAL_FAMILIES:
        yield Check(name=f"bfloat16 embeddings/{family}", run=partial(check_embeddings, family))
    for family in FAMILIES:
        yield Check(
            name=f"bfloat16 decoder/{family}/torch", run=partial(check_decoder, family, "torch")
        )
    for family in wide:
        for backend in BACKENDS:
            yield Check(
                name=f"bfloat16 decoder/{family}/{backend}",
                run=partial(check_decoder, family, backend),
            )
        yield Check(
            name=f"bfloat16 decoder/{family}/auto", run=partial(check_decoder, family, "auto")
        )
    for mistake in MISTAKES:
        yield Check(name=f"bfloat16 control/{mistake}", run=partial(check_control, mistake))


def _get_trial_checks() -> Iterator[Check]:
    for family in ("llama", "internvl", "glm4v", "audioflamingo3", "smolvlm"):
        for dtype in (torch.float32, torch.bfloat16):
            yield Check(
                name=f"trial/{family}/{_name(dtype)}/torch",
                run=partial(check_trial, family, dtype, "torch"),
            )
    for family in ("wide-llama", "wide-llava", "wide-qwen2_5_vl"):
        for backend in BACKENDS:
            yield Check(
                name=f"trial/{family}/bfloat16/{backend}",
                run=partial(check_trial, family, torch.bfloat16, backend),
            )
    for dtype in (torch.float32, torch.bfloat16):
        yield Check(
            name=f"trial/control/{_name(dtype)}",
            run=partial(check_trial_control, "wide-llava", dtype),
        )


def _get_sync_checks() -> Iterator[Check]:
    for name, dtype, backend in (
        ("llama", torch.float32, "torch"),
        ("gemma3", torch.float32, "torch"),
        ("wide-qwen2_5_vl", torch.bfloat16, "torch"),
        ("wide-qwen2_5_vl", torch.bfloat16, "triton"),
        ("wide-qwen2_5_vl", torch.bfloat16, "flashinfer"),
        ("wide-gemma3", torch.bfloat16, "flashinfer"),
        ("wide-llama", torch.bfloat16, "varlen"),
    ):
        yield Check(
            name=f"syncs/decode/{name}/{_name(dtype)}/{backend}",
            run=partial(check_decode_syncs, name, dtype, backend),
        )
    yield Check(name="syncs/structured/llama", run=partial(check_structured_syncs, "llama"))
    for dtype in (torch.float32, torch.bfloat16):
        yield Check(
            name=f"structured/llama/{_name(dtype)}",
            run=partial(check_structured_answers, "llama", dtype),
        )
    for family in ("llava", "qwen2_5_vl"):
        yield Check(name=f"syncs/encode/{family}", run=partial(check_encoder_syncs, family))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
