"""Weights in files: small shards in float16, and the stock checkpoint that they belong to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.model import Thinker

MAX_SHARD_BYTES = 15 * 2**20
WHISPER = "whisper_encoder.safetensors"


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """What adds to the residual stream begins at zero."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "embed_tokens" in name:
            parameter.normal_(0.0, 0.02)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            parameter.zero_()
        elif parameter.ndim > 1:
            parameter.normal_(0.0, 1 / math.sqrt(parameter[0].numel()))


def load_whisper(model: Thinker, folder: Path) -> None:
    """The tower is frozen, but for the projection behind it."""
    tower = model.model.audio_tower
    state = load_file(folder / WHISPER)
    state = {name.removeprefix("audio_tower."): tensor.float() for name, tensor in state.items()}
    missing, unexpected = tower.load_state_dict(state, strict=False)
    expected = {"proj.weight", "proj.bias", "audio_bos_eos_token.weight"}
    if unexpected or set(missing) != expected:
        raise ValueError(f"{WHISPER}: missing {missing}, unexpected {unexpected}")
    for name, parameter in tower.named_parameters():
        parameter.requires_grad = name.startswith("proj.")


def save_shards(model: nn.Module, folder: Path) -> None:
    """What was trained, in files `trained-N.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensor = parameter.detach().half().cpu().contiguous()
        if num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes += tensor.nbytes
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"trained-{number}.safetensors")


def load_shards(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("trained-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no trained-*.safetensors")
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def restore(model: nn.Module, folder: Path) -> None:
    unexpected = model.load_state_dict(load_shards(folder), strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"{folder}: unexpected {unexpected}")


def make_stock(model: nn.Module, config: Any) -> Any:
    """The stock model with these weights."""
    import transformers as tf

    stock = tf.Qwen2_5OmniThinkerForConditionalGeneration(config)
    missing, unexpected = stock.load_state_dict(model.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    stock.tie_weights()
    return stock.eval()
