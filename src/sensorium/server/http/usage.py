"""Counts the tokens of a response for its `usage`, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from sensorium.server.http.protocol.answers import PromptTokensDetails, Usage
from sensorium.server.http.protocol.tokens import WireUsage
from sensorium.types.outputs import RequestOutput

_MAX_COUNT = 2**53 - 1  # the largest integer that every reader of JSON reads exactly


def make_usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the token counts of a response; a prompt counts once for all its completions."""
    details = PromptTokensDetails(
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        image_tokens=_count_media(outputs, "image"),
        audio_tokens=_count_media(outputs, "audio"),
        video_tokens=_count_media(outputs, "video"),
    )
    return count_usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(entry.token_ids) for output in outputs for entry in output.outputs),
        details=details,
    )


def _count_media(outputs: Sequence[RequestOutput], modality: str) -> int:
    return sum(output.mm_tokens.get(modality, 0) for output in outputs)


def count_usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    *,
    details: PromptTokensDetails | None = None,
) -> Usage:
    """Return the token counts of a response; `details` is `None` if they are not known."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=details,
    )


def sum_details(usages: Sequence[WireUsage | None]) -> PromptTokensDetails | None:
    """Return the sum of each detail that all of `usages` have, or `None` if there is none."""
    details = PromptTokensDetails(
        cached_tokens=_sum_counts(usages, "cached_tokens"),
        image_tokens=_sum_counts(usages, "image_tokens"),
        audio_tokens=_sum_counts(usages, "audio_tokens"),
        video_tokens=_sum_counts(usages, "video_tokens"),
    )
    return None if details == PromptTokensDetails() else details


def _sum_counts(usages: Sequence[WireUsage | None], name: str) -> int | UnsetType:
    counts = [_get_count(usage, name) for usage in usages]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else UNSET


def _get_count(usage: WireUsage | None, name: str) -> int | None:
    details = None if usage is None else usage.prompt_tokens_details
    count = None if details is None else details.get(name)
    return count if type(count) is int and 0 <= count <= _MAX_COUNT else None
