"""Lets encoders attend to all sequences of a batch in one call.

Many towers of Transformers pack pictures, frames or windows behind one another. For each attention
implementation whose name contains "flash" they call it once, with the lengths; for all others they
call it in a loop, and wait for the device to learn the lengths. So ours has such a name. Only
towers that have this way of calling get it; all others keep the attention that they have.
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
# The implementation that is replaced, and that computes what comes without lengths.
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
    """Let towers use the attention of this name."""
    for tower in towers:
        tower.config._attn_implementation = name


def _can_pack(tower: PreTrainedModel) -> bool:
    """Return whether the code of a tower asks for a flash attention, and tells it the lengths."""
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
    """Compute attention as Transformers' interface wants it."""
    if cu_seq_lens_q is None:
        dense = ALL_ATTENTION_FUNCTIONS[DENSE_ATTENTION]
        output, _ = dense(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    lengths = derive(cu_seq_lens_q, PackedLengths.from_starts)
    kernel = choose_packed_kernel(query.device, query.dtype, query.shape[-1])
    return kernel.attend(query, key, value, lengths, scaling=scaling), None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)
# Without this line Transformers would make no masks, and padding would be attended to in silence.
ALL_MASK_ATTENTION_FUNCTIONS.register(
    PACKED_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[DENSE_ATTENTION]
)
