"""Draws a token for each row from its distribution, after temperature and filters.

Each draw uses one random number, which depends only on the request's seed and the token's index in
the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sensorium.worker.sampling.logits_edits import Arrays
from sensorium.worker.sampling.sampling_row import SamplingRow

# How many of the likeliest tokens are sorted for a filter with a `top_k`. Sorting a vocabulary of
# 150,000 tokens takes ten times as long.
_WIDTHS = (64, 1024)


def prepare_draw(rows: Sequence[SamplingRow], vocab_size: int) -> Arrays:
    """Return the arrays that `draw` needs: an empty dict if all rows are greedy."""
    random = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not random:
        return {}
    params = [rows[index].params for index in random]
    indices = [rows[index].num_output_tokens for index in random]
    arrays: Arrays = {
        "random_rows": np.array(random, dtype=np.int64),
        "temperature": np.array([p.temperature for p in params], dtype=np.float64),
        "uniform": get_uniforms([p.seed or 0 for p in params], indices),
    }
    widths = [_get_width(p.top_k or 0, p.top_p) for p in params]
    for width in {width for width in widths if width is not None}:
        filtered = [index for index, other in enumerate(widths) if other == width]
        top_k = [min(params[index].top_k or vocab_size, vocab_size) for index in filtered]
        # Infinity keeps all tokens: with 1.0, rounding could cut off the tail of the row.
        top_p = [np.inf if params[i].top_p == 1.0 else params[i].top_p for i in filtered]
        arrays[f"filtered_rows{width}"] = np.array(filtered, dtype=np.int64)
        arrays[f"top_k{width}"] = np.array(top_k, dtype=np.int64)
        arrays[f"top_p{width}"] = np.array(top_p, dtype=np.float64)
    if any(p.min_p for p in params):
        arrays["min_p"] = np.array([p.min_p or 0.0 for p in params], dtype=np.float64)
    return arrays


def _get_width(top_k: int, top_p: float | None) -> int | None:
    """Return how many of the likeliest tokens a filter has to look at, or None without a filter.

    The number is one of `_WIDTHS`, or 0 for all tokens. It does not depend on other rows, so that
    their options can't change how this row is rounded.
    """
    if not top_k and top_p == 1.0:
        return None
    return next((width for width in _WIDTHS if top_k and top_k <= width), 0)


def draw(logits: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a random token id for each row of logits [B, vocabulary] in `random_rows`."""
    scaled = logits.index_select(0, tensors["random_rows"])
    probs = (scaled / tensors["temperature"].float()[:, None]).softmax(-1)
    weights = probs
    for width in (*_WIDTHS, 0):
        if f"filtered_rows{width}" in tensors:
            rows = tensors[f"filtered_rows{width}"]
            top_k, top_p = tensors[f"top_k{width}"], tensors[f"top_p{width}"]
            filtered = _filter(probs.index_select(0, rows), top_k, top_p, width)
            weights = weights.index_copy(0, rows, filtered)
    if "min_p" in tensors:
        least = probs.amax(-1, keepdim=True) * tensors["min_p"].float()[:, None]
        weights = torch.where(probs < least, 0.0, weights)
    return _invert(weights, tensors["uniform"])


def get_uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each pair of a seed and an index, as their hash.

    The hash is the finaliser of SplitMix64, applied twice.
    """
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = _mix(words) + np.array(indices, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = _mix(words)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _filter(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the probabilities with zeros for the tokens that `top_k` and `top_p` remove.

    First only the `top_k` likeliest tokens of each row are kept. Of these, as few as possible are
    kept, the likeliest first, until they hold the share `top_p` of their total probability. Of
    equally likely tokens those with smaller ids come first. Only the `width` likeliest tokens of
    each row are sorted, at least the largest `top_k`; 0 means all.
    """
    if width:
        ranked = probs.topk(min(width, probs.shape[-1])).values
    else:
        ranked = probs.sort(dim=-1, descending=True).values
    is_kept = torch.arange(ranked.shape[-1], device=probs.device) < top_k[:, None]
    mass = (ranked.double() * is_kept).cumsum(-1)
    is_kept &= mass - ranked < top_p[:, None] * mass[:, -1:]
    num_kept = is_kept.sum(-1, keepdim=True)
    least = ranked.gather(1, (num_kept - 1).clamp_min(0))  # none is kept of a row of NaN
    is_above, is_least = probs > least, probs == least
    num_least = num_kept - is_above.sum(-1, keepdim=True)
    return probs * (is_above | (is_least & (is_least.cumsum(-1) <= num_least)))


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the index in each row at which the cumulative weight first exceeds `uniform`.

    The weight is taken as a share of the row's total. So uniform numbers [rows] in [0, 1) give each
    index with a probability in proportion to its weight.
    """
    cumulative = weights.double().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put the target at the very end. Then the last index with any weight is taken.
    last = weights.shape[-1] - 1 - weights.gt(0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)
