"""Joins the tensors of media items to one batch for an encoder, and cuts its output into items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem


def gather_arguments(
    items: Sequence[MultiModalKwargsItem], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the named tensors of media items, concatenated over the items that have them."""
    found = {name: [item[name] for item in items if name in item] for name in names}
    return {name: torch.cat(tensors) for name, tensors in found.items() if tensors}


def get_num_parts(item: MultiModalKwargsItem) -> int:
    """Return an item's entries in an encoder's batch: 1, or the chunks of a long audio item."""
    # Tensors with a larger first dimension hold patches.
    return min((len(tensor) for tensor in item.values() if tensor.ndim), default=0)


def split_output(
    output: Any, num_parts: Sequence[int], num_embeds: Sequence[int]
) -> list[torch.Tensor]:
    """Return the embeddings of each media item from an encoder's output, or raise `RequestError`.

    `num_parts` has the number of each item's entries in the encoder's batch, and `num_embeds` the
    number of embeddings that it must have. If the output is divided into entries, embeddings are
    counted for each item, so that a wrong number for one can't shift those of the next.
    """
    embeds = output.pooler_output
    if embeds is None:
        embeds = output.last_hidden_state
    mask = getattr(output, "attention_mask", None)
    if isinstance(embeds, torch.Tensor) and embeds.ndim == 3 and mask is not None:
        embeds = [row[is_valid.bool()] for row, is_valid in zip(embeds, mask, strict=True)]
    elif isinstance(embeds, torch.Tensor) and embeds.ndim == 3:
        embeds = embeds.unbind()
    if isinstance(embeds, torch.Tensor):
        check_num_embeds([len(embeds)], [sum(num_embeds)])
        return list(embeds.split(list(num_embeds)))
    parts = [part.reshape(-1, part.shape[-1]) for part in embeds]
    if len(parts) == sum(num_parts):
        remaining = iter(parts)
        counts = [sum(map(len, islice(remaining, number))) for number in num_parts]
        check_num_embeds(counts, num_embeds)
    else:
        check_num_embeds([sum(map(len, parts))], [sum(num_embeds)])
    return list(torch.cat(parts).split(list(num_embeds)))


def check_num_embeds(found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise `RequestError` if the numbers of embeddings, per item or batch, are not as expected."""
    for num_found, num_expected in zip(found, expected, strict=True):
        if num_found != num_expected:
            raise RequestError(
                f"the encoder gave {num_found} embeddings for media items that need "
                f"{num_expected}, one for each placeholder token"
            )


def collate(items: Sequence[MultiModalKwargsItem]) -> dict[str, torch.Tensor]:
    """Concatenate items' tensors by name, or raise `RequestError` if their names differ."""
    names = items[0].keys()
    for item in items:
        if item.keys() != names:
            raise RequestError(
                "the media items of one encoder batch have different tensors: "
                f"{sorted(names)}, {sorted(item)}"
            )
    return {name: torch.cat([item[name] for item in items]) for name in names}
