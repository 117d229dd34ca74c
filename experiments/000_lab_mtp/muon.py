"""Muon (Jordan 2024): momentum, orthogonalized by a quintic Newton-Schulz iteration, in float32.

torch's own `Muon` iterates in bfloat16, which a CPU without bfloat16 units emulates: four times the cost of the
whole step here. Matrices of one shape are iterated as one batch.
"""

from __future__ import annotations

from collections import defaultdict

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate polar factor of every matrix in g: [N, rows, cols]."""
    a, b, c = COEFFICIENTS
    tall = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape)].append(p)
            for shape, params in by_shape.items():
                self._step_shape(group, shape, params)

    def _step_shape(self, group: dict, shape: tuple, params: list) -> None:
        ahead = []
        for p in params:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - group["momentum"])
            ahead.append(p.grad.lerp(buffer, group["momentum"]))
        scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        for p, update in zip(params, orthogonalize(torch.stack(ahead)), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)
