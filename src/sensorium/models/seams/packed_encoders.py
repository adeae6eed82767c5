"""Lets encoders compute a batch of packed sequences without waiting for the device.

Many encoders of Transformers, also called towers, pack pictures, frames or windows into one
sequence. Two things make them wait for the device, and both are changed here:

1. Attention. If the name of the attention implementation contains "flash", towers call it once and
pass the lengths. Any other implementation is called in a loop, for which they read the lengths from
the device. So ours has "flash" in its name. Only towers that can call it in this way get it.

2. Lengths and positions. Towers derive them from the grids of their pictures with functions of
`transformers.vision_utils`, which read the grids back from the device. Inside `keep_host_copies`
these functions compute on the host and send their results to the device; outside, they work as
before. They are replaced in the towers' Python modules, under the names that are used there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel, vision_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import get_max_seqlen, is_flash_attention_requested

from sensorium.layers.attention.packed import PackedLengths, choose_packed_kernel
from sensorium.models.seams.host_copies import HostCopies, get_host_copies

PACKED_ATTENTION = "sensorium_flash_packed"
# The implementation that ours replaces, and that it uses for calls without lengths.
DENSE_ATTENTION = "sdpa"


# ---- attention


def find_packing_towers(model: PreTrainedModel, decoder: torch.nn.Module) -> list[PreTrainedModel]:
    """Return the encoders of a model that can be called with the lengths of packed sequences.

    Parts of the decoder, and modules that contain it, are left out.
    """
    inside_decoder = set(decoder.modules())
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and module not in inside_decoder
        and not any(part is decoder for part in module.modules())
        and module.config._attn_implementation == DENSE_ATTENTION
        and _can_pack(module)
    ]


def set_attention(towers: list[PreTrainedModel], name: str) -> None:
    """Make encoders (towers) use the attention that Transformers has registered under this name."""
    for tower in towers:
        tower.config._attn_implementation = name


def _can_pack(tower: PreTrainedModel) -> bool:
    """Return whether an encoder's code passes the lengths of sequences to a flash attention."""
    module = sys.modules[type(tower).__module__]
    asks = any(value is is_flash_attention_requested for value in vars(module).values())
    return asks and "cu_seq_lens_q=" in inspect.getsource(module)


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,  # starts of packed sequences, and the total
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output of an encoder layer; Transformers calls this function."""
    if cu_seq_lens_q is None:  # the batch is not packed
        dense = ALL_ATTENTION_FUNCTIONS[DENSE_ATTENTION]
        output, _ = dense(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    attend = choose_packed_kernel(query.device, query.dtype, query.shape[-1])
    return attend(query, key, value, _get_lengths(cu_seq_lens_q), scaling), None


def _get_lengths(starts: torch.Tensor) -> PackedLengths:
    """Return lengths of sequences from their starts; without a host copy, wait for the device."""
    copies = get_host_copies()
    if copies is None:
        return PackedLengths.from_starts(starts, starts.cpu())
    return copies.get_lengths(starts)


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)
# Without this line Transformers would make no masks, and tokens would attend to padding unnoticed.
ALL_MASK_ATTENTION_FUNCTIONS.register(
    PACKED_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[DENSE_ATTENTION]
)


# ---- lengths and positions


def compute_on_host(towers: Iterable[PreTrainedModel]) -> None:
    """Make encoders compute lengths and positions on the host, inside `keep_host_copies`.

    Each Python module that defines an encoder is changed once.
    """
    for name in {type(tower).__module__ for tower in towers}:
        names = vars(sys.modules[name])
        for key, value in list(names.items()):
            if _derives_from_grids(value):
                names[key] = _on_host(value)


def _derives_from_grids(value: Any) -> bool:
    if getattr(value, "computes_on_host", False) or not callable(value):
        return False
    is_helper = getattr(value, "__module__", None) == vision_utils.__name__
    return value is get_max_seqlen or (is_helper and value.__name__.startswith("get_"))


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def compute(*arguments: Any, **options: Any) -> Any:
        copies = get_host_copies()
        given = [*arguments, *options.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if copies is None or any(copies.find(tensor) is None for tensor in tensors):
            return function(*arguments, **options)
        result = function(
            *(_replace(value, copies) for value in arguments),
            **{name: _replace(value, copies) for name, value in options.items()},
        )
        device = tensors[0].device
        if isinstance(result, tuple):
            return tuple(_send(value, device, copies) for value in result)
        return _send(result, device, copies)

    compute.computes_on_host = True  # type: ignore[attr-defined]
    return compute


def _replace(value: Any, copies: HostCopies) -> Any:
    return copies.find(value) if isinstance(value, torch.Tensor) else value


def _send(value: Any, device: torch.device, copies: HostCopies) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    return copies.send(value, device)
