"""Fused modules compute what the originals do, and the originals come back."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sensorium.models  # noqa: F401  (before Transformers' model classes)
from sensorium.layers import kernels
from sensorium.models.adapter import ModelAdapter
from sensorium.models.kv_probe import KVProbe
from sensorium.models.loading import load_config, load_model
from sensorium.models.seams import fusion as fusion_module
from sensorium.models.seams.fusion import fuse
from sensorium.models.seams.sibling_products import SiblingGroup, find_groups
from tests.parity.cases import FAMILIES

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _load(directory: str) -> ModelAdapter:
    return load_model(directory, load_config(directory), dtype=torch.float32, device=CPU)


def _get_linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_products_change_nothing(tiny_model: Callable[[str], str], family: str) -> None:
    adapter = _load(tiny_model(family))
    with torch.inference_mode():
        expected = [adapter._run_two_tokens(KVProbe()) for _ in range(2)]
        adapter.fuse()
        found = [adapter._run_two_tokens(KVProbe()) for _ in range(2)]
        with adapter.own_attention():
            assert not any("forward" in vars(module) for module in _get_linears(adapter.model))
    if family != "phi3":  # its products are joined already
        assert adapter.fusion.counts["joined products"] > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class _Attention(nn.Module):
    def __init__(self, width: int = 12, *, has_bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, 8, bias=has_bias)
        self.k_proj = nn.Linear(width, 4, bias=has_bias)
        self.v_proj = nn.Linear(width, 4, bias=has_bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        y = x if y is None else y
        return torch.cat([self.q_proj(x), self.k_proj(y), self.v_proj(y)], dim=-1)


@pytest.mark.parametrize("has_bias", [True, False])
def test_siblings_are_one_product(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Attention(has_bias=has_bias)
    x = torch.randn(3, 12)
    expected = module(x)
    [group] = find_groups(module).values()
    calls = []
    multiply = SiblingGroup.multiply
    monkeypatch.setattr(
        SiblingGroup, "multiply", lambda self, x: calls.append(x) or multiply(self, x)
    )
    torch.testing.assert_close(module(x), expected)
    assert len(calls) == 1
    assert module.q_proj.weight.untyped_storage().data_ptr() == (
        group.weight.untyped_storage().data_ptr()
    )


def test_members_with_different_inputs_fall_apart_and_stay_right() -> None:
    module = _Attention()
    x, y = torch.randn(2, 3, 12)
    expected = module(x, y)
    find_groups(module)
    for _ in range(3):
        torch.testing.assert_close(module(x, y), expected)
    torch.testing.assert_close(module(x), torch.cat([module.q_proj(x), module(x)[..., 8:]], -1))


def test_a_member_that_is_not_called_costs_nothing_but_speed() -> None:
    """Layers that share keys and values never ask for theirs."""
    module = _Attention()
    find_groups(module)
    for _ in range(3):
        x = torch.randn(3, 12)
        expected = nn.functional.linear(x, module.q_proj.weight, module.q_proj.bias)
        torch.testing.assert_close(module.q_proj(x), expected)


class _Mixed(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.v_proj = nn.Linear(12, 4, bias=False)


@pytest.mark.parametrize(
    "module",
    [_Mixed(), nn.ModuleDict({"q_proj": nn.Linear(3, 4), "k_proj": nn.Linear(3, 4)})],
    ids=["one has no bias", "one is missing"],
)
def test_what_is_not_alike_is_not_joined(module: nn.Module) -> None:
    assert find_groups(module) == {}


# ---- with kernels, in Triton's interpreter


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fuse on a CPU as on a GPU, and leave Transformers' functions as they were."""
    monkeypatch.setattr(kernels, "find_obstacle", lambda _: None)
    changed: list[tuple[Any, str, Any]] = []
    original = fusion_module._fuse_rotary

    def remember(fusion: Any, module_name: str, *arguments: Any) -> None:
        names = vars(fusion_module.sys.modules[module_name])
        before = dict(names)
        original(fusion, module_name, *arguments)
        changed.extend(
            (names, name, before[name]) for name in before if names[name] is not before[name]
        )

    monkeypatch.setattr(fusion_module, "_fuse_rotary", remember)
    yield
    for names, name, value in changed:
        names[name] = value


@needs_triton
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"joined products", "gated layers", "norms", "rotary functions"}),
        ("qwen2_5_vl", {"joined products", "gated layers", "norms", "rotary functions"}),
        ("gemma3", {"joined products", "gated layers", "norms", "rotary functions"}),
        ("glm4v", {"joined products", "norms"}),  # pairs of neighbours are rotated
        ("gemma4", {"joined products", "gated layers", "norms"}),
    ],
)
@pytest.mark.usefixtures("with_kernels")
def test_kernels_change_nothing_but_rounding(
    tiny_model: Callable[[str], str], family: str, kinds: set[str]
) -> None:
    adapter = _load(tiny_model(family))
    with torch.inference_mode():
        expected = adapter._run_two_tokens(KVProbe())
        adapter.fusion = fuse(adapter.model, CPU)
        found = adapter._run_two_tokens(KVProbe())
        with adapter.fusion.paused():
            again = adapter._run_two_tokens(KVProbe())
    assert kinds <= {kind for kind, count in adapter.fusion.counts.items() if count}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, expected)
