"""Rotary factors are chosen for each token, whatever else is in its step."""

from __future__ import annotations

import torch
import transformers as tf

from sensorium.models.long_context import LongRope

BORDER = 16


def make_rotary() -> torch.nn.Module:
    config = tf.Phi3Config(
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=BORDER,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 4.0, 9.0, 20.0],
        },
    )
    return tf.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)


def compute(rotary: torch.nn.Module, positions: list[int]) -> torch.Tensor:
    return torch.stack(rotary(torch.zeros(1), torch.tensor([positions])))


def test_each_token_gets_the_factors_of_its_request() -> None:
    """Long requests also have tokens before the border."""
    own, rotary = make_rotary(), make_rotary()
    rope = LongRope(torch.nn.ModuleList([rotary]))
    assert rope.long_after == BORDER
    short, long = [0, 3, BORDER - 1], [0, 3, BORDER, 40]
    with rope.choosing(torch.tensor([False] * 3 + [True] * 4)):
        together = compute(rotary, [*short, *long])
    assert torch.equal(together[:, :, :3], compute(own, short))
    assert torch.equal(together[:, :, 3:], compute(own, long))


def test_long_requests_keep_their_factors_when_a_step_has_their_first_tokens_only() -> None:
    own, rotary = make_rotary(), make_rotary()
    with LongRope(torch.nn.ModuleList([rotary])).choosing(torch.tensor([True, True])):
        first = compute(rotary, [0, 1])
    assert torch.equal(first, compute(own, [0, 1, BORDER])[:, :, :2])


def test_nothing_is_left_behind_by_a_step() -> None:
    own, rotary = make_rotary(), make_rotary()
    rope = LongRope(torch.nn.ModuleList([rotary]))
    with rope.choosing(torch.tensor([True])):
        compute(rotary, [3])
    for positions in ([1, 2], [1, BORDER + 3], [1, 2]):
        assert torch.equal(compute(rotary, positions), compute(own, positions))


def test_other_modules_are_unchanged() -> None:
    module = torch.nn.Linear(2, 2)
    assert LongRope(torch.nn.ModuleList([module])).long_after is None
    assert "forward" not in vars(module)
