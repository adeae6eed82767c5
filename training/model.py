"""The forward pass for training: the stock model's arithmetic for batches of one shape.

Parameters have the stock names and shapes, so that a state dict goes either way; a test compares
the logits of both. The stock code attends to each picture in a Python loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from training.architecture import MERGE

# Layers of the language model after which it should know where each token stands; and what things
# that were named or seen have to do with others.
EARLY, LATER = 2, 4


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Gated(nn.Module):
    def __init__(self, size: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [B, T, heads, dim] by cosines and sines [B or 1, T, 1, dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attend with [B, T, heads, dim]; keys and values may have fewer heads."""
    if q.shape[2] != k.shape[2]:
        times = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2).flatten(2)


def run_block(x: Tensor, cos: Tensor, sin: Tensor, dim: int, causal: bool, *weights: Any) -> Tensor:
    """Run one layer of text or vision, as a function of tensors that is compiled once for all.

    The weights are matrices and vectors; a vector that the layer lacks is None.
    """
    norm, q_w, q_b, k_w, k_b, v_w, v_b, o_w, o_b, *rest = weights
    other_norm, gate_w, gate_b, up_w, up_b, down_w, down_b = rest
    size = (x.shape[-1],)
    shape = (*x.shape[:2], -1, dim)
    normed = F.rms_norm(x, size, norm, 1e-6)
    q = rotate(F.linear(normed, q_w, q_b).view(shape), cos, sin)
    k = rotate(F.linear(normed, k_w, k_b).view(shape), cos, sin)
    v = F.linear(normed, v_w, v_b).view(shape)
    x = x + F.linear(attend(q, k, v, causal=causal), o_w, o_b)
    normed = F.rms_norm(x, size, other_norm, 1e-6)
    inner = F.silu(F.linear(normed, gate_w, gate_b)) * F.linear(normed, up_w, up_b)
    return x + F.linear(inner, down_w, down_b)


class Blocks:
    """How blocks are run: as they are, or compiled, once for all batch sizes and lengths."""

    run: Callable[..., Tensor] = staticmethod(run_block)

    @classmethod
    def compile(cls) -> None:
        compiled = torch.compile(run_block)

        def run(x: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> Tensor:
            for tensor in (x, cos, sin):
                for axis in (0, 1):
                    if tensor.shape[axis] > 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, axis)
            out: Tensor = compiled(x, cos, sin, *others)
            return out

        cls.run = staticmethod(run)

    @classmethod
    @contextmanager
    def as_they_are(cls) -> Iterator[None]:
        """Run blocks without compiling; without gradients other code would have to be compiled."""
        run, cls.run = cls.run, staticmethod(run_block)
        try:
            yield
        finally:
            cls.run = staticmethod(run)


def _weights_of(*layers: nn.Linear | Gated) -> Iterator[Tensor | None]:
    for layer in layers:
        if isinstance(layer, Gated):
            yield from _weights_of(layer.gate_proj, layer.up_proj, layer.down_proj)
        else:
            yield from (layer.weight, layer.bias)


class TextAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dim = config.hidden_size // config.num_attention_heads
        inner = self.dim * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, inner)
        self.v_proj = nn.Linear(config.hidden_size, inner)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class TextLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = TextAttention(config)
        self.mlp = Gated(config.hidden_size, config.intermediate_size, bias=False)
        self.input_layernorm = Norm(config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = self.self_attn
        return Blocks.run(
            x,
            cos,
            sin,
            attention.dim,
            True,
            self.input_layernorm.weight,
            *_weights_of(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            self.post_attention_layernorm.weight,
            *_weights_of(self.mlp),
        )


class TextModel(nn.Module):
    frequencies: Tensor
    axes: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        dim = config.hidden_size // config.num_attention_heads
        frequencies = rope["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        sections = enumerate(rope["mrope_section"])
        axes = [place % 3 for place, count in sections for _ in range(count)]
        self.register_buffer("axes", torch.tensor(axes), persistent=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Hidden states at the end, and after a few layers and some more.

        `positions` [3, B, T]: of time, height and width.
        """
        angles = positions.permute(1, 2, 0)[..., self.axes].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, :, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        on_the_way = []
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, cos, sin)
            if number in (EARLY, LATER):
                on_the_way.append(x)
        return self.norm(x), on_the_way


class VisionAttention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.dim = size // num_heads
        self.q, self.k, self.v, self.proj = (nn.Linear(size, size) for _ in range(4))


class VisionBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(config.hidden_size), Norm(config.hidden_size)
        self.attn = VisionAttention(config.hidden_size, config.num_heads)
        self.mlp = Gated(config.hidden_size, config.intermediate_size, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = self.attn
        return Blocks.run(
            x,
            cos,
            sin,
            attention.dim,
            False,
            self.norm1.weight,
            *_weights_of(attention.q, attention.k, attention.v, attention.proj),
            self.norm2.weight,
            *_weights_of(self.mlp),
        )


class PatchEmbed(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(3, config.hidden_size, kernel, kernel, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1))


class Merger(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size * MERGE**2
        self.ln_q = Norm(config.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(size, size), nn.GELU(), nn.Linear(size, config.out_hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(len(x), x.shape[1] // MERGE**2, -1))
        return out


class Vision(nn.Module):
    frequencies: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim = config.hidden_size // config.num_heads // 2
        frequencies = 1e4 ** -(torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = Merger(config)

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        """Pictures of `height` x `width` patches [B, N, 1176] to tokens [B, N / 4, LM]."""
        rows = torch.arange(height, device=patches.device)[:, None].expand(height, width)
        columns = torch.arange(width, device=patches.device)[None].expand(height, width)
        places = torch.stack((rows, columns)).view(2, height // 2, 2, width // 2, 2)
        places = places.transpose(2, 3).flatten(1).float()
        angles = (places[..., None] * self.frequencies).permute(1, 0, 2).flatten(1)
        angles = torch.cat((angles, angles), -1)[None, :, None]
        x = self.patch_embed(patches).float()  # what is added early on is small
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.merger(x)
        return out


class SoundAttention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.dim = size // num_heads
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.dim)
        q, k, v = (f(x).view(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.out_proj(attend(q, k, v, causal=False))
        return out


class SoundLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.d_model
        self.self_attn = SoundAttention(size, config.encoder_attention_heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class Sound(nn.Module):
    """Whisper's encoder, then the mean of two neighbours, then our projection."""

    places: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.d_model
        steps = torch.arange(size // 2) * (torch.log(torch.tensor(1e4)) / (size // 2 - 1))
        times = torch.arange(config.max_source_positions)[:, None] * torch.exp(-steps)
        places = torch.cat((times.sin(), times.cos()), 1)
        self.register_buffer("places", places, persistent=False)
        self.conv1 = nn.Conv1d(config.num_mel_bins, size, 3, padding=1)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1)
        self.audio_bos_eos_token = nn.Embedding(2, config.output_dim)
        self.layers = nn.ModuleList(SoundLayer(config) for _ in range(config.encoder_layers))
        self.ln_post = nn.LayerNorm(size)
        self.proj = nn.Linear(size, config.output_dim)

    def forward(self, mel: Tensor) -> Tensor:
        """Turn `mel` [B, 80, frames] with 4 n frames into tokens [B, n, LM]."""
        with torch.no_grad():
            x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
            x = x + self.places[: x.shape[1]].to(x.dtype)
            for layer in self.layers:
                x = layer(x)
            x = self.ln_post(x.view(len(x), -1, 2, x.shape[2]).mean(2))
        out: Tensor = self.proj(x)
        return out


class Parts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.audio_tower = Sound(config.audio_config)
        self.visual = Vision(config.vision_config)
        self.language_model = TextModel(config.text_config)


class Thinker(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Parts(config)

    def forward(
        self, tokens: Tensor, positions: Tensor, media: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states [B * T, LM] of the last layer and of layers on the way.

        `media` has places in the flattened tokens, and the embeddings that stand there.
        """
        text = self.model.language_model
        x = text.embed_tokens(tokens).flatten(0, 1)
        for places, features in media:
            x = x.index_copy(0, places, features.flatten(0, -2).to(x.dtype))
        last, on_the_way = text(x.view(*tokens.shape, -1), positions)
        return last.flatten(0, 1), [hidden.flatten(0, 1) for hidden in on_the_way]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.language_model.embed_tokens.weight)
