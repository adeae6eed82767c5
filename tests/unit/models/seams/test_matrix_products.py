"""Widths are padded where that changes nothing but the speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sensorium.models.seams.matrix_products import align_widths


class _Gated(nn.Module):
    def __init__(self, width: int, *, has_bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(16, width, bias=has_bias)
        self.up = nn.Linear(16, width, bias=has_bias)
        self.down = nn.Linear(width, 24, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class _Normed(_Gated):
    """A module with a norm over its inner width."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class _Softmaxed(_Gated):
    """A module with a softmax over its inner width, which only the comparison can find."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1))


class _Scaled(_Gated):
    """A module with a norm without parameters, which padding with zeros changes little."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        return self.down(inner / inner.square().mean(-1, keepdim=True).sqrt())


class _Halved(_Gated):
    """A module with a width that its code names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).view(-1, 7, 3).flatten(1))


class _TwoInputs(_Gated):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + y)


@pytest.mark.parametrize(
    "module",
    [
        _Gated(21),
        _Gated(21, has_bias=False),
        nn.Sequential(nn.Linear(16, 21), nn.GELU(), nn.Linear(21, 24)),
    ],
    ids=["gated", "no bias", "a sequence"],
)
def test_a_padded_module_computes_the_same(module: nn.Module) -> None:
    rows = torch.randn(5, 16)
    model = nn.ModuleList([nn.Sequential(module)])
    expected = module(rows)

    assert align_widths(model) == 1

    torch.testing.assert_close(module(rows), expected)
    sizes = {d for p in module.parameters() for d in p.shape}
    assert 64 in sizes
    assert 21 not in sizes


@pytest.mark.parametrize(
    "module",
    [
        _Gated(24),
        _Normed(21),
        _Softmaxed(21),
        _Scaled(21),
        _Scaled(3420).bfloat16(),
        _Softmaxed(3420, has_bias=False).bfloat16(),
        _Halved(21),
        _TwoInputs(21),
        nn.Linear(16, 21),
    ],
    ids=[
        "aligned",
        "a norm inside",
        "all are mixed",
        "a norm without weights",
        "a wide norm",
        "a wide mixture",
        "another shape",
        "two inputs",
        "nothing behind it",
    ],
)
def test_a_module_that_would_change_stays_as_it_is(module: nn.Module) -> None:
    model = nn.Sequential(module)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    assert align_widths(model) == 0

    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_product_that_two_modules_use_stays_as_it_is() -> None:
    first, second = _Gated(21), _Gated(21)
    second.up = first.up
    assert align_widths(nn.ModuleList([first, second])) == 0
