"""Lets encoders compute the attention of all sequences of a batch in one call.

Many encoders of Transformers, or towers, pack pictures, frames or windows into one sequence. If the
name of the attention implementation contains "flash", they call it once and pass the lengths. Any
other implementation is called in a loop, for which they read the lengths from the device and wait.
So ours has "flash" in its name. Only towers that can call it in this way get it. All others keep
their attention.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from sensorium.layers.attention.packed import PackedLengths, choose_packed_kernel
from sensorium.models.seams.host_lengths import derive

PACKED_ATTENTION = "sensorium_flash_packed"
# The implementation that ours replaces, and that it uses for calls without lengths.
DENSE_ATTENTION = "sdpa"


def find_packing_towers(model: PreTrainedModel, decoder: torch.nn.Module) -> list[PreTrainedModel]:
    """Return the encoders that can be called with the lengths of packed sequences."""
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
    """Make towers use the attention implementation of this name."""
    for tower in towers:
        tower.config._attn_implementation = name


def _can_pack(tower: PreTrainedModel) -> bool:
    """Return whether a tower's code checks for a flash attention, and passes it the lengths."""
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
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention behind the interface of Transformers."""
    if cu_seq_lens_q is None:
        dense = ALL_ATTENTION_FUNCTIONS[DENSE_ATTENTION]
        output, _ = dense(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    lengths = derive(cu_seq_lens_q, PackedLengths.from_starts)
    kernel = choose_packed_kernel(query.device, query.dtype, query.shape[-1])
    return kernel.attend(query, key, value, lengths, scaling=scaling), None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)
# Without this line Transformers would make no masks, and tokens would attend to padding unnoticed.
ALL_MASK_ATTENTION_FUNCTIONS.register(
    PACKED_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[DENSE_ATTENTION]
)
