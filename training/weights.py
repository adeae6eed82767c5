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
NEIGHBOUR_STRENGTH = 2.5
MARK_STRENGTH = 3.3
MAX_MARK_DISTANCE = 9.0


@torch.no_grad()
def initialize(model: Thinker, seed: int, mark: int) -> None:
    """Start what adds to the residual stream at zero, and attention with a plan.

    A random vision tower takes long to find out that neighbours belong together: its heads begin
    with looking at neighbours. And its positions are only relative, so that it can't tell where a
    thing stands: heads in the first layers of the language model begin with looking at the mark
    before a picture, each from other rows or columns.
    """
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
    text: Any = model.model.language_model
    for layer in text.layers:  # some distances rather than others
        layer.self_attn.q_proj.bias.normal_(0.0, 0.7)
        layer.self_attn.k_proj.bias.normal_(0.0, 0.7)
    _look_at_mark(text, mark)
    visual: Any = model.model.visual
    for number, block in enumerate(visual.blocks):
        _look_at_neighbours(block.attn, visual.frequencies, distance=1 + number // 2)


def _look_at_mark(text: Any, mark: int) -> None:
    """Each head sees the mark from places around one row or column, and little from others."""
    heads = [
        (layer.self_attn, head)
        for layer in text.layers[:2]
        for head in range(layer.self_attn.q_proj.out_features // layer.self_attn.dim)
    ]
    embedding = text.embed_tokens.weight[mark]
    direction = embedding / embedding.square().mean().sqrt() / len(embedding)
    half = len(text.frequencies)
    is_sharp = text.frequencies > 0.05
    for attention in {id(each): each for each, _ in heads}.values():
        keys = attention.k_proj.weight.view(-1, 2, half, len(embedding))
        keys[:, 0] += MARK_STRENGTH * direction
        attention.q_proj.weight *= 0.3  # what stands at the place matters less
    for number, (attention, head) in enumerate(heads):
        axis = 1 + number % 2  # rows and columns take turns
        distance = 1 + MAX_MARK_DISTANCE * (number // 2) / (len(heads) // 2 - 1)
        chosen = is_sharp & (text.axes == axis)
        angles = -text.frequencies * distance
        bias = attention.q_proj.bias.view(-1, 2, half)[head]
        bias[0] += MARK_STRENGTH * angles.cos() * chosen
        bias[1] += MARK_STRENGTH * angles.sin() * chosen


def _look_at_neighbours(attention: Any, frequencies: Tensor, *, distance: int) -> None:
    """The score of a place is highest at the neighbour above, below, left or right.

    Half of a head turns with the row, half with the column; a pair of numbers at the angle
    `frequency * offset` meets one at the angle zero where the offset is made up for.
    """
    offsets = ((-distance, 0), (distance, 0), (0, -distance), (0, distance))
    queries, keys = attention.q.bias.view(-1, 2, attention.dim // 2), attention.k.bias
    keys.view(-1, 2, attention.dim // 2)[:, 0] = NEIGHBOUR_STRENGTH
    for head in range(len(queries)):
        rows, columns = offsets[head % len(offsets)]
        angles = torch.cat((frequencies * rows, frequencies * columns))
        queries[head, 0] = NEIGHBOUR_STRENGTH * angles.cos()
        queries[head, 1] = NEIGHBOUR_STRENGTH * angles.sin()


def load_whisper(model: Thinker, folder: Path) -> None:
    """Load the audio tower, which stays frozen but for the projection behind it."""
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
    """Save what was trained in files `trained-N.safetensors`."""
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
    """Return the stock model with these weights."""
    import transformers as tf

    stock = tf.Qwen2_5OmniThinkerForConditionalGeneration(config)
    missing, unexpected = stock.load_state_dict(model.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    stock.tie_weights()
    return stock.eval()
