"""Fuses the many small kernels of a model into fewer ones, without touching its source.

There are six kinds of replacements: padding of badly aligned matrix widths, joined matrix products
of the same input, gated layers, norms, sums that are followed by a norm, and rotary positions. Each
one is compared with the original on random input when it is made. If it differs by more than
rounding, the original stays.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from sensorium.layers import kernels
from sensorium.models.seams.comparing import find_closest, get_distance, is_rounding, make_rows
from sensorium.models.seams.matrix_products import SiblingGroup, align_widths, find_groups
from sensorium.models.seams.residual_layers import find_parts, make_forward

logger = logging.getLogger(__name__)

_ROTARY_PREFIXES = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb")
_EPS_NAMES = ("variance_epsilon", "eps")


@dataclass
class Fusion:
    """A record of the modules that have fused forms, which can switch the fused forms off."""

    # Kind -> number of replacements, for the log.
    counts: Counter[str] = field(default_factory=Counter)
    # Modules and the `forward` that replaces their own.
    _forwards: list[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)

    def __str__(self) -> str:
        counts = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        return ", ".join(counts) or "nothing"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model compute as Transformers wrote it, inside a `with`.

        Padded matrix widths stay, because they don't change the results.
        """
        self.turn_off()
        try:
            yield
        finally:
            for module, forward in self._forwards:
                module.forward = forward

    def turn_off(self) -> None:
        for module, _ in self._forwards:
            del module.forward

    def add_forward(self, kind: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.counts[kind] += 1
        self._forwards.append((module, forward))
        module.forward = forward


@torch.inference_mode()
def fuse(model: nn.Module, device: torch.device) -> Fusion:
    """Replace what can be fused on this device, in place, and return what was replaced."""
    fusion = Fusion()
    if device.type == "cuda" and next(model.parameters()).dtype.itemsize == 2:
        fusion.counts["padded widths"] = align_widths(model)
    groups = find_groups(model)
    for group in (group for siblings in groups.values() for group in siblings):
        fusion.counts["joined products"] += 1
        for member in group.members:
            fusion._forwards.append((member, member.forward))
    if kernels.find_obstacle(device) is None:
        for module in model.modules():
            _try(_fuse_gate, fusion, module, groups.get(module, ()))
        # Each fused norm -> the arguments of its kernel.
        norms: dict[nn.Module, dict[str, Any]] = {}
        for module in model.modules():
            _try(_fuse_norm, fusion, module, norms)
        for module in model.modules():
            _try(_fuse_residual, fusion, module, norms)
        _fuse_rotary_positions(fusion, model)
    return fusion


def _try(fuse_one: Callable[..., None], fusion: Fusion, module: nn.Module, *arguments: Any) -> None:
    """Call `fuse_one` for a module that was not replaced yet; if that fails, the module stays."""
    if "forward" in vars(module):  # it has been replaced already
        return
    try:
        fuse_one(fusion, module, *arguments)
    except Exception:  # a module may only look like one that can be fused, and then raise anything
        logger.debug("%s was not tried", type(module).__name__, exc_info=True)


# ---- gated layers


def _fuse_gate(fusion: Fusion, layer: nn.Module, groups: Sequence[SiblingGroup]) -> None:
    from sensorium.layers.kernels.fused_layers import ACTIVATIONS, activate_and_multiply

    both = getattr(layer, "gate_up_proj", None)  # in some models the two products are one already
    down = getattr(layer, "down_proj", None)
    group = next((group for group in groups if len(group.members) == 2), None)
    multiply: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(both, nn.Linear):
        weight, multiply = both.weight, both
    elif group is not None and not any(map(_has_hooks, group.members)):
        weight, multiply = group.weight, group.multiply
    else:
        return
    if not isinstance(down, nn.Linear) or not _takes_one(layer):
        return
    x = make_rows(weight, weight.shape[1])
    exact = _copy_exactly(layer)
    inner, products = _find_inner(exact, x.float())
    candidates = [activate_and_multiply(products, kind=kind) for kind in ACTIVATIONS]
    if (index := find_closest(candidates, inner)) is None:
        return
    kind = ACTIVATIONS[index]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return down(activate_and_multiply(multiply(x), kind=kind))

    if is_rounding(get_distance(forward(x), layer(x)), x.dtype):
        fusion.add_forward("gated layers", layer, forward)


def _copy_exactly(layer: nn.Module) -> nn.Module:
    """Return a float32 copy of a layer with its original `forward`, without replacements.

    In half precision, some activations that differ by a tenth at small values look the same.
    """
    replaced = {part: part.forward for part in layer.modules() if "forward" in vars(part)}
    for part in replaced:
        del part.forward
    try:
        return copy.deepcopy(layer).float()
    finally:
        for part, forward in replaced.items():
            part.forward = forward


def _find_inner(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of a gated layer's last product, and the joined outputs of the first."""
    seen: list[torch.Tensor] = []
    layer.get_submodule("down_proj").register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    layer(x)
    [inner] = seen
    if hasattr(layer, "gate_up_proj"):
        return inner, layer.get_submodule("gate_up_proj")(x)
    parts = [layer.get_submodule(name)(x) for name in ("gate_proj", "up_proj")]
    return inner, torch.cat(parts, -1)


# ---- norms, and sums in front of them


def _fuse_norm(fusion: Fusion, module: nn.Module, norms: dict[nn.Module, dict[str, Any]]) -> None:
    from sensorium.layers.kernels.fused_layers import normalize

    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or not _takes_one(module):
        return
    if weight is None or weight.ndim != 1:  # its width can't be found
        return
    x = make_rows(weight, len(weight))
    variants: list[dict[str, Any]] = [
        {"weight": weight, "eps": float(eps), "offset": offset, "rounds_first": rounds_first}
        for offset in (0.0, 1.0)
        for rounds_first in (True, False)
    ]
    candidates = [normalize(x, **variant) for variant in variants]
    if (index := find_closest(candidates, module(x))) is not None:
        norms[module] = variants[index]
        fusion.add_forward("norms", module, partial(normalize, **variants[index]))


def _fuse_residual(
    fusion: Fusion, layer: nn.Module, norms: Mapping[nn.Module, dict[str, Any]]
) -> None:
    from sensorium.layers.kernels.fused_layers import add_and_normalize

    parts = find_parts(layer)
    if parts is None or parts.second_norm not in norms or _has_hooks(parts.second_norm):
        return
    add = partial(add_and_normalize, **norms[parts.second_norm])
    if (forward := make_forward(layer, parts, add)) is not None:
        fusion.add_forward("sums with norms", layer, forward)


# ---- rotary positions


def _fuse_rotary_positions(fusion: Fusion, model: nn.Module) -> None:
    """Make the attention modules of a model apply rotary positions with our kernel.

    Each module gets a copy of its `forward` with other globals, in which our function has the name
    of Transformers' own. Other models in the process keep Transformers' function.
    """
    weight = next(model.parameters())
    forwards: dict[Any, FunctionType | None] = {}
    for module in model.modules():
        forward: Any = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        if forward not in forwards:
            forwards[forward] = _make_rotating(forward, weight)
        if (rotating := forwards[forward]) is not None:
            fusion.add_forward("rotary positions", module, MethodType(rotating, module))


def _make_rotating(forward: FunctionType, weight: torch.Tensor) -> FunctionType | None:
    functions = {
        name: rotate
        for name in forward.__code__.co_names
        if name.startswith(_ROTARY_PREFIXES)
        and (rotate := _make_rotate(forward.__globals__.get(name), weight)) is not None
    }
    if not functions:
        return None
    names = {**forward.__globals__, **functions}
    rotating = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rotating.__kwdefaults__ = forward.__kwdefaults__
    return rotating


def _make_rotate(original: Any, weight: torch.Tensor) -> Callable[..., Any] | None:
    """Return our form of a rotary function of Transformers, or None if the results differ."""
    from sensorium.layers.kernels.fused_layers import rotate

    parameters = list(inspect.signature(original).parameters) if callable(original) else []
    if parameters[:4] != ["q", "k", "cos", "sin"]:
        return None
    # Decoders rotate [1, H, N, D], encoders [N, H, D]. Each is compared and used in its own layout.
    is_batched = "unsqueeze_dim" in parameters

    def rotate_both(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        is_dense = q.stride(-1) == k.stride(-1) == 1
        is_known = is_dense and q.ndim == k.ndim == cos.ndim + 1 == (4 if is_batched else 3)
        token_axis = 2 if is_batched else 0
        size = (q.shape[token_axis], q.shape[-1])  # the size that the angles must have
        if (
            arguments
            or options
            or not is_known
            or cos.shape[-2:] != size
            or sin.shape != cos.shape
            or k.shape[token_axis] != size[0]
            or (is_batched and not len(q) == len(cos) == 1)
        ):
            return original(q, k, cos, sin, *arguments, **options)
        if not is_batched:
            return rotate(q, k, cos.contiguous(), sin.contiguous())
        cos, sin = cos[0].contiguous(), sin[0].contiguous()
        new_q, new_k = rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
        return new_q.transpose(0, 1)[None], new_k.transpose(0, 1)[None]

    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if is_batched:
        shapes = [((1, 4, 6, size), (1, 6, size)) for size in (64, 128)]
    else:
        shapes = [((6, 4, size), (6, size)) for size in (64, 80)]
    try:
        agrees = all(_agrees(rotate_both, original, *shape, weight) for shape in shapes)
    except Exception:  # a function that needs other arguments
        logger.debug("%s was not tried", original, exc_info=True)
        return None
    return rotate_both if agrees else None


def _agrees(
    rotate: Callable[..., Any],
    original: Callable[..., Any],
    shape: tuple[int, ...],
    angles: tuple[int, ...],
    weight: torch.Tensor,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    # The angles of both halves differ, so that a function that pairs neighbours does not agree.
    inputs = [
        torch.randn(size, generator=generator).to(weight) for size in (shape, shape, angles, angles)
    ]
    pairs = zip(rotate(*inputs), original(*inputs), strict=True)
    return all(is_rounding(get_distance(a, b), weight.dtype) for a, b in pairs)


# ---- shared helpers


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks, which a fused form would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2  # `self` and the tensor
