"""Decides when a request ends because of its tokens; the frontend looks for stop strings."""

from __future__ import annotations

from sensorium.core.request import Request
from sensorium.types.request import FinishReason


def get_stop(
    request: Request, *, max_model_len: int, is_complete: bool = False
) -> tuple[FinishReason, int | None] | None:
    """Return why the request ends with its newest token, or `None` if it goes on.

    The second value is the token id if a stop token of the caller ended it. With `is_complete` its
    grammar allows nothing more, so that it ends in spite of `min_tokens` and `ignore_eos`.
    """
    params = request.sampling_params
    token_id = request.token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if token_id in request.core_request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if is_complete:
        return FinishReason.STOP, None
    if params.max_tokens is not None and request.num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH, None
    if request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None
