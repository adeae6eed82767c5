"""Muon for the matrices inside the layers, AdamW for the rest.

torch's Muon works matrix by matrix, a hundred small kernels each; here matrices of one shape are
orthogonalized together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_NUM_ROUNDS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring matrices [n, rows, columns] near orthogonal ones by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.transpose(1, 2) if is_tall else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(_NUM_ROUNDS):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    done: Tensor = x.transpose(1, 2) if is_tall else x
    return done


class Muon(torch.optim.Optimizer):
    """An optimizer that gives each matrix a step of the size that AdamW's would have."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(parameters), defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [p.grad for p in parameters if p.grad is not None]
                moments = [self._moment(parameter) for parameter in parameters]
                torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, moments, group["momentum"])
                steps = orthogonalize(torch.stack(ahead).flatten(2)).to(parameters[0].dtype)
                size = group["lr"] * 0.2 * max(steps.shape[1:]) ** 0.5
                steps = steps.reshape(-1, *shape)
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(steps.unbind()), alpha=-size)

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["moment"] = torch.zeros_like(parameter)
        moment: Tensor = state["moment"]
        return moment


def make_optimizers(
    model: nn.Module, guides: nn.Module, *, lr: float
) -> list[torch.optim.Optimizer]:
    inner: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_inner = parameter.ndim >= 2 and "embed_tokens" not in name
        (inner if is_inner else others).append(parameter)
    others += guides.parameters()
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [Muon(inner, lr=lr), adam]
