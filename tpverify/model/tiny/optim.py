"""Muon for the matrices (Keller Jordan, 2024), AdamW for the rest, one cosine for both."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

# Quintic coefficients that push every singular value of a matrix towards 1 in five steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Optimizer:
    """Steps a module's gradients. Matrices other than embeddings take Muon, everything else AdamW."""

    def __init__(self, module: nn.Module, steps: int, muon_lr: float, adam_lr: float, weight_decay: float) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for n, p in module.named_parameters() if p.requires_grad and p.ndim == 2 and "embed" not in n]
        taken = {id(p) for p in matrices}
        rest = [p for p in self.parameters if id(p) not in taken]
        fused = self.parameters[0].is_cuda
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
        self.by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in matrices:
            self.by_shape[p.shape].append(p)
        self.momentum = {shape: torch.zeros_like(torch.stack(ps)) for shape, ps in self.by_shape.items()}
        self.steps, self.muon_lr, self.adam_lr, self.weight_decay = steps, muon_lr, adam_lr, weight_decay

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Clip to norm 1, update, and clear the gradients; `step` counts from 0 and places the learning rate."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        scale = schedule(step, self.steps)
        for shape, params in self.by_shape.items():
            gradient = torch.stack([p.grad for p in params if p.grad is not None])
            momentum = self.momentum[shape].lerp_(gradient, 0.05)
            update = orthogonalized(gradient.lerp(momentum, 0.95))
            lr = scale * self.muon_lr
            rate = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            torch._foreach_add_(params, list(update.unbind()), alpha=-rate)
        for group in self.adam.param_groups:
            group["lr"] = scale * self.adam_lr
        self.adam.step()
        for p in self.parameters:
            p.grad = None


def schedule(step: int, steps: int) -> float:
    """Linear over the first 2 %, then a cosine down to 2 %."""
    warm = max(1, steps // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def orthogonalized(update: Tensor) -> Tensor:
    """Newton-Schulz on [k, rows, columns] float32: each matrix goes to about the nearest orthogonal one."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
