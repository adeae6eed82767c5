"""Changes single logits of a batch: bias, penalties, masks and bans, each for all rows at once.

`prepare_edits` builds index arrays on the host, row by row; `apply_edits` works on the device. An
index is a place in the flattened logits: row * vocabulary size + token id. Ids outside the
vocabulary are skipped, because they can't be chosen anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sensorium.utils.arrays import IntArray
from sensorium.worker.sampling.sampling_row import SamplingRow

Arrays = dict[str, npt.NDArray[np.generic]]
_Edited = Sequence[tuple[int, SamplingRow]]  # the rows that have edits, with their index


def prepare_edits(rows: Sequence[SamplingRow], vocab_size: int) -> Arrays:
    """Return the arrays that `apply_edits` needs: an empty dict if no logit changes."""
    edited = [(index, row) for index, row in enumerate(rows) if row.is_edited]
    if not edited:
        return {}
    arrays: Arrays = {}
    if any(row.params.logit_bias for _, row in edited):
        arrays |= _prepare_bias(edited, vocab_size)
    if any(row.counts is not None for _, row in edited):
        arrays |= _prepare_penalties(edited, vocab_size)
    if any(row.params.allowed_token_ids is not None for _, row in edited):
        arrays |= _prepare_allowed(edited, vocab_size)
    if any(row.mask is not None for _, row in edited):
        arrays |= _prepare_masks(edited, vocab_size)
    if any(row.banned_ranges is not None for _, row in edited):
        arrays |= _prepare_times(edited)
    if any(row.banned_token_ids for _, row in edited):
        arrays["banned_at"] = _get_places(
            ((index, row.banned_token_ids) for index, row in edited), vocab_size
        )
    return arrays


def apply_edits(logits: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a copy of the float32 logits [B, vocabulary] with all edits; banned are -inf."""
    edited = logits.clone(memory_format=torch.contiguous_format)
    flat = edited.view(-1)
    if "bias_at" in tensors:
        at = tensors["bias_at"]
        flat.index_copy_(0, at, flat.index_select(0, at) + tensors["bias"].float())
    if "seen_at" in tensors:
        at, repetition = tensors["seen_at"], tensors["repetition"].float()
        values = flat.index_select(0, at)
        values = torch.where(values < 0, values * repetition, values / repetition)
        flat.index_copy_(0, at, values - tensors["penalty"].float())
    if "allowed_at" in tensors:
        _keep_allowed(edited, tensors["allowed_rows"], tensors["allowed_at"])
    if "mask_rows" in tensors:
        _keep_masked(edited, tensors["mask_rows"], tensors["mask_words"])
    if "banned_at" in tensors:
        flat.index_fill_(0, tensors["banned_at"], float("-inf"))
    if "time_rows" in tensors:
        _keep_times(edited, tensors)
    return edited


def _keep_allowed(logits: torch.Tensor, rows: torch.Tensor, allowed_at: torch.Tensor) -> None:
    is_banned = torch.ones(len(rows), logits.shape[-1], dtype=torch.bool, device=logits.device)
    is_banned.view(-1).index_fill_(0, allowed_at, False)
    kept = logits.index_select(0, rows).masked_fill_(is_banned, float("-inf"))
    logits.index_copy_(0, rows, kept)


def _keep_masked(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Set the logits that the grammar masks of some rows forbid to -inf, in place.

    The masks `words` [rows, words of 64 bits] are read as bytes: the lowest bit of the first byte
    is token 0, and a bit that is set allows its token.
    """
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = torch.bitwise_left_shift(torch.ones_like(places), places)
    is_banned = (words.view(torch.uint8).unsqueeze(-1) & bits) == 0
    is_banned = is_banned.view(len(rows), -1)[:, : logits.shape[-1]]
    kept = logits.index_select(0, rows).masked_fill_(is_banned, float("-inf"))
    logits.index_copy_(0, rows, kept)


def _keep_times(logits: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Apply Whisper's rules for timestamps to some rows, in place.

    First each row's ranges are banned. Then, if all timestamps together are likelier than each
    token of text, the tokens of text are banned.
    """
    rows, first = tensors["time_rows"], tensors["time_first"][:, None]
    places = torch.arange(logits.shape[-1], device=logits.device)
    ranges = tensors["time_ranges"].view(len(rows), -1, 2, 1)
    is_banned = ((places >= ranges[:, :, 0]) & (places < ranges[:, :, 1])).any(1)
    kept = logits.index_select(0, rows).masked_fill_(is_banned, float("-inf"))
    logprobs, is_text = kept.log_softmax(-1), places < first
    times = logprobs.masked_fill(is_text, float("-inf")).logsumexp(-1, keepdim=True)
    text = logprobs.masked_fill(~is_text, float("-inf")).amax(-1, keepdim=True)
    kept.masked_fill_(is_text & (times > text), float("-inf"))
    logits.index_copy_(0, rows, kept)


def _prepare_times(edited: _Edited) -> Arrays:
    """Return the rows with rules for timestamps, and their banned ranges, padded to one number."""
    ruled = [(index, row.banned_ranges, row) for index, row in edited if row.banned_ranges]
    most = max(len(ranges) for _, ranges, _ in ruled)
    padded = [[*ranges, *[(0, 0)] * (most - len(ranges))] for _, ranges, _ in ruled]
    return {
        "time_rows": np.array([index for index, _, _ in ruled], dtype=np.int64),
        "time_first": np.array([_get_first_time(row) for _, _, row in ruled], dtype=np.int64),
        "time_ranges": np.array(padded, dtype=np.int64).reshape(-1),
    }


def _get_first_time(row: SamplingRow) -> int:
    rules = row.params.speech
    return 0 if rules is None or rules.timestamps is None else rules.timestamps.first_id


def _prepare_bias(edited: _Edited, vocab_size: int) -> Arrays:
    entries = [
        (index * vocab_size + token_id, bias)
        for index, row in edited
        for token_id, bias in row.params.logit_bias.items()
        if token_id < vocab_size
    ]
    return {
        "bias_at": np.array([place for place, _ in entries], dtype=np.int64),
        "bias": np.array([bias for _, bias in entries], dtype=np.float64),
    }


def _prepare_penalties(edited: _Edited, vocab_size: int) -> Arrays:
    places: list[IntArray] = []
    repetitions: list[npt.NDArray[np.float64]] = []
    penalties: list[npt.NDArray[np.float64]] = []
    for index, row in edited:
        if row.counts is None:
            continue
        is_known = row.counts.token_ids < vocab_size
        token_ids = row.counts.token_ids[is_known]
        counts = row.counts.num_in_output[is_known]
        params = row.params
        places.append(index * vocab_size + token_ids)
        repetitions.append(np.full(len(token_ids), params.repetition_penalty or 1.0))
        penalties.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    return {
        "seen_at": np.concatenate(places),
        "repetition": np.concatenate(repetitions),
        "penalty": np.concatenate(penalties),
    }


def _prepare_allowed(edited: _Edited, vocab_size: int) -> Arrays:
    """Return the rows with `allowed_token_ids`, and the places of these ids among those rows."""
    allowed = [
        (index, row.params.allowed_token_ids)
        for index, row in edited
        if row.params.allowed_token_ids is not None
    ]
    return {
        "allowed_rows": np.array([index for index, _ in allowed], dtype=np.int64),
        "allowed_at": _get_places(enumerate(ids for _, ids in allowed), vocab_size),
    }


def _prepare_masks(edited: _Edited, vocab_size: int) -> Arrays:
    """Return the rows with grammar masks, and the masks as 64-bit words.

    A mask may have fewer bits than the model has logits, or more: it is cut, or padded with zeros,
    which ban their tokens.
    """
    masks = [(index, row.mask) for index, row in edited if row.mask is not None]
    words = np.zeros((len(masks), -(-vocab_size // 64)), dtype=np.int64)
    for place, (_, mask) in enumerate(masks):
        num_words = min(len(mask), words.shape[1])
        words[place, :num_words] = mask[:num_words]
    return {
        "mask_rows": np.array([index for index, _ in masks], dtype=np.int64),
        "mask_words": words,
    }


def _get_places(ids_of_rows: Iterable[tuple[int, Sequence[int]]], vocab_size: int) -> IntArray:
    places = [
        index * vocab_size + token_id
        for index, token_ids in ids_of_rows
        for token_id in token_ids
        if token_id < vocab_size
    ]
    return np.array(places, dtype=np.int64)
