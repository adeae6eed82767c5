"""Fused modules compute what the originals do, and the originals come back."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sensorium.models  # noqa: F401  (before Transformers' model classes)
from sensorium.layers import kernels
from sensorium.models.hf_model import HfModel
from sensorium.models.loading import load_config, load_model
from sensorium.models.seams.comparing import CausalAttention
from sensorium.models.seams.fusion import fuse
from sensorium.models.seams.matrix_products import SiblingGroup, find_groups
from tests.parity.cases import FAMILIES

CPU = torch.device("cpu")
ALL_KINDS = ("joined products", "gated layers", "norms", "sums with norms", "rotary positions")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def in_interpreter(test: Any) -> Any:
    """Ignore what NumPy says about Triton's interpreter."""
    for words in ("Conversion of an array:DeprecationWarning", "overflow:RuntimeWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{words}")(test)
    return test


def _load(directory: str) -> HfModel:
    return load_model(directory, load_config(directory), dtype=torch.float32, device=CPU)


def _get_linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_products_change_nothing(tiny_model: Callable[[str], str], family: str) -> None:
    hf_model = _load(tiny_model(family))
    with torch.inference_mode():
        expected = [hf_model._run_two_tokens(CausalAttention()) for _ in range(2)]
        hf_model.fuse()
        found = [hf_model._run_two_tokens(CausalAttention()) for _ in range(2)]
        with hf_model.own_attention():
            assert not any("forward" in vars(module) for module in _get_linears(hf_model.model))
    if family != "phi3":  # its products are joined already
        assert hf_model.fusion.counts["joined products"] > 0
    for ours, theirs in zip(found, expected, strict=True):
        # Processors sum in orders of their own: the last bits differ between kinds of them.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


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
    [[group]] = find_groups(module).values()
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


def test_members_with_different_inputs_are_split_and_stay_right() -> None:
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
def test_unlike_modules_are_not_joined(module: nn.Module) -> None:
    assert find_groups(module) == {}


# ---- with kernels, in Triton's interpreter


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse on a CPU as on a GPU."""
    monkeypatch.setattr(kernels, "find_obstacle", lambda _: None)


@needs_triton
@in_interpreter
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {*ALL_KINDS}),
        ("qwen2_5_vl", {*ALL_KINDS}),
        ("gemma3", {"joined products", "gated layers", "norms", "rotary positions"}),
        ("glm4v", {"joined products", "gated layers", "norms"}),  # pairs of neighbours are rotated
        ("phi3", {"gated layers", "norms", "sums with norms", "rotary positions"}),
        ("gemma4", {"joined products", "gated layers", "norms"}),
    ],
)
@pytest.mark.usefixtures("with_kernels")
def test_kernels_change_nothing_but_rounding(
    tiny_model: Callable[[str], str], family: str, kinds: set[str]
) -> None:
    hf_model = _load(tiny_model(family))
    with torch.inference_mode():
        expected = hf_model._run_two_tokens(CausalAttention())
        hf_model.fusion = fuse(hf_model.model, CPU)
        found = hf_model._run_two_tokens(CausalAttention())
        with hf_model.fusion.paused():
            again = hf_model._run_two_tokens(CausalAttention())
    assert kinds <= {kind for kind, count in hf_model.fusion.counts.items() if count}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, expected)


class _RMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class _Echo(nn.Module):
    """A module that stands for attention."""

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return hidden_states * scale


class _Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = _RMSNorm(width, eps=1e-5), _RMSNorm(width, eps=1e-5)
        self.attn, self.mlp = _Echo(), nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), scale=scale)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class _Parallel(_Layer):
    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        normalized = self.norm1(hidden_states)
        attended = self.attn(normalized, scale=scale)
        return hidden_states + attended + self.mlp(self.norm2(hidden_states))


class _Doubling(_Layer):
    """A module that changes its input before attention gets it."""

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        doubled = 2.0 if isinstance(scale, float) else None
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), scale=doubled)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class _Scaled(_Layer):
    """A module that halves the output of attention."""

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden_states = hidden_states + 0.5 * self.attn(self.norm1(hidden_states), scale=scale)
        return hidden_states + self.mlp(self.norm2(hidden_states))


@needs_triton
@in_interpreter
@pytest.mark.parametrize(
    ("kind", "is_fused"), [(_Layer, True), (_Parallel, False), (_Doubling, False), (_Scaled, False)]
)
@pytest.mark.usefixtures("with_kernels")
@torch.inference_mode()
def test_a_layer_of_another_kind_keeps_its_sums(kind: type[_Layer], is_fused: bool) -> None:
    layer = kind()
    x = torch.randn(1, 5, 16)
    expected = [layer(x), layer(x, 0.3), layer(x, scale=0.2)]
    fusion = fuse(layer, CPU)
    assert fusion.counts["norms"] == 2
    assert fusion.counts["sums with norms"] == is_fused
    found = [layer(x), layer(x, 0.3), layer(x, scale=0.2)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_fusions_that_change_the_model_as_a_whole_are_not_used(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hf_model = _load(tiny_model("llama"))
    expected = hf_model._run_two_tokens(CausalAttention())
    multiply = SiblingGroup._compute
    monkeypatch.setattr(
        SiblingGroup, "_compute", lambda self, index, x: multiply(self, index, x) * 1.01
    )
    hf_model.fuse()
    assert hf_model.fusion.counts.total() == 0
    assert "nothing is fused" in caplog.text
    assert "6 joined products would change its results by" in caplog.text
    assert torch.equal(hf_model._run_two_tokens(CausalAttention()), expected)


@needs_triton
@in_interpreter
@pytest.mark.usefixtures("with_kernels")
@torch.inference_mode()
def test_only_the_fused_model_rotates_by_our_kernel(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sensorium.layers.kernels import fused_layers

    calls = []
    rotate = fused_layers.rotate
    monkeypatch.setattr(fused_layers, "rotate", lambda *inputs: calls.append(1) or rotate(*inputs))
    fused, other = (_load(tiny_model("llama")) for _ in range(2))
    fused.fuse()
    calls.clear()
    other._run_two_tokens(CausalAttention())
    assert not calls
    fused._run_two_tokens(CausalAttention())
    assert len(calls) == fused.fusion.counts["rotary positions"] == 3


# ---- what only looks like something that is known


class _Gated(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], limit: float = 1e9) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 64, bias=False)
        self.up_proj = nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32, bias=False)
        self._act = act
        self._limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=self._limit), self.up_proj(x)
        return self.down_proj(self._act(gate) * up)


class _GroupRMSNorm(nn.Module):
    """Each half of a row is divided by its own size."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.float().unflatten(-1, (2, -1))
        halves = halves * torch.rsqrt(halves.square().mean(-1, keepdim=True) + self.eps)
        return halves.flatten(-2).to(x.dtype) * self.weight


class _FailingRMSNorm(_GroupRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, _ = x.shape  # no other shape will do
        return x * batch


@needs_triton
@in_interpreter
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    "module",
    [_Gated(nn.functional.silu, limit=10.0), _GroupRMSNorm(), _FailingRMSNorm()],
    ids=["a clamp", "norms of halves", "another shape"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_that_only_look_alike_are_not_fused(module: nn.Module, dtype: torch.dtype) -> None:
    fusion = fuse(module.to(dtype), CPU)
    assert not fusion.counts["gated layers"]
    assert not fusion.counts["norms"]


@needs_triton
@in_interpreter
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("silu", nn.functional.silu),
        ("gelu", nn.functional.gelu),
        ("gelu_tanh", nn.GELU(approximate="tanh")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_is_found(
    kind: str, act: Callable[..., torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sensorium.layers.kernels import fused_layers

    torch.manual_seed(0)
    module = _Gated(act).to(dtype)
    assert fuse(module, CPU).counts["gated layers"] == 1
    kinds = []
    noting = _Noting(fused_layers._multiply, kinds)
    monkeypatch.setattr(fused_layers, "_multiply", noting)
    module(torch.randn(2, 32, dtype=dtype))
    assert kinds == [kind]


class _Noting:
    """A kernel that notes its kinds."""

    def __init__(self, kernel: Any, kinds: list[str]) -> None:
        self._kernel = kernel
        self._kinds = kinds

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            self._kinds.append(options["KIND"])
            self._kernel[grid](*arguments, **options)

        return run


def test_a_module_with_two_groups_gets_all_originals_back() -> None:
    module = _Attention()
    module.gate_proj, module.up_proj = nn.Linear(12, 8), nn.Linear(12, 8)
    fusion = fuse(module, CPU)
    assert fusion.counts["joined products"] == 2
    with fusion.paused():
        assert not any("forward" in vars(linear) for linear in _get_linears(module))


@needs_triton
@in_interpreter
@pytest.mark.usefixtures("with_kernels")
def test_parts_with_hooks_are_still_called() -> None:
    module, calls = _Gated(nn.functional.silu), []
    module.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    fuse(module, CPU)
    calls.clear()
    module(torch.randn(2, 32))
    assert calls


@needs_triton
@in_interpreter
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("num_pictures", [1, 2])
def test_a_tower_with_another_layout_is_rotated_as_before(num_pictures: int) -> None:
    """This one has its tokens before its heads, and a batch."""
    from transformers import MLCDVisionConfig, MLCDVisionModel

    torch.manual_seed(0)
    config = MLCDVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )
    model = MLCDVisionModel(config).eval()
    pixels = torch.randn(num_pictures, 3, 28, 28)
    with torch.inference_mode():
        expected = model(pixels).last_hidden_state
        fuse(model, CPU)
        torch.testing.assert_close(model(pixels).last_hidden_state, expected)
