"""Outputs of requests, with times that are easy to read."""

from __future__ import annotations

from sensorium.types.outputs import CompletionOutput, MediaItemReport, RequestOutput
from sensorium.types.request import CoreTimes, FinishReason

ARRIVED = 100.0  # at the frontend
# 0.5 s on the way, 1 s queued, 2 s of prefill with 0.75 s of encoding, 3 s of decoding.
TIMES = CoreTimes(arrived=102.0, scheduled=103.0, first_token=105.0, finished=108.0, encode_s=0.75)
STAGES = {"wait_thread": 0.125, "render": 0.25, "perceive": 1.0}


def make_output(
    *lengths: int,
    reasons: tuple[FinishReason, ...] | None = None,
    times: CoreTimes | None = TIMES,
    num_cached_tokens: int = 4,
    encoder_hits: tuple[int, ...] = (),
    mm_items: tuple[MediaItemReport, ...] = (),
) -> RequestOutput:
    """Make an output for a prompt of 10 tokens, with one completion per length."""
    ends = reasons or (FinishReason.STOP,) * len(lengths)
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1,) * 10,
        outputs=tuple(
            CompletionOutput(index=i, text="", token_ids=(2,) * length, finish_reason=reason)
            for i, (length, reason) in enumerate(zip(lengths, ends, strict=True))
        ),
        finished=True,
        num_cached_tokens=num_cached_tokens,
        num_encoder_hits=len(encoder_hits),
        encoder_hits=encoder_hits,
        mm_items=mm_items,
        times=times,
        stages=STAGES if times is None else STAGES | {"transfer": 0.5},
    )
