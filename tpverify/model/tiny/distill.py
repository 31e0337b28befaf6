"""Stage three: the drafter learns to continue the target's text a block at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.model.drafter import Drafter
from tpverify.model.tiny.generate import Generated
from tpverify.model.tiny.optim import Optimizer
from tpverify.model.tiny.pretrain import initialize
from tpverify.model.tiny.target import Target


@dataclass(frozen=True)
class DistillRecipe:
    """decay: the loss of the i-th drafted byte weighs exp(-i / decay); an early miss ends the accepted run."""

    steps: int
    sequences: int = 64
    blocks: int = 32
    decay: float = 7.0
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    seed: int = 2


def distill(
    drafter: Drafter, target: Target, data: Generated, recipe: DistillRecipe, report: Callable[[int, str], None]
) -> None:
    """Train in place. report(step, line) is called about six times, the last time after the last step."""
    device = data.tokens.device
    generator = torch.Generator().manual_seed(recipe.seed)
    initialize(drafter, generator)
    features = target_features(target, data.tokens, drafter.feature_layers)
    optimizer = Optimizer(drafter, recipe.steps, recipe.muon_lr, recipe.adam_lr, recipe.weight_decay)
    loss_of = torch.compile(block_losses) if device.type == "cuda" else block_losses
    weights = torch.exp(-torch.arange(drafter.block_size - 1, device=device) / recipe.decay)
    latest = data.tokens.shape[1] - drafter.block_size
    start, every = time.monotonic(), max(1, -(-recipe.steps // 6))
    for step in range(recipe.steps):
        rows = torch.randint(len(data.tokens), (recipe.sequences,), generator=generator).to(device)
        chance = torch.rand(recipe.sequences, recipe.blocks, generator=generator).to(device)
        first = data.prompts[rows, None]  # a root is always a byte the target chose
        anchors = first + (chance * (latest + 1 - first)).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = loss_of(drafter, features[rows], data.tokens[rows].long(), anchors)
        loss = (losses.mean((0, 1)) * weights).sum() / weights.sum()
        loss.backward()
        optimizer.step(step)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            bits = loss.item() / math.log(2)
            report(step + 1, f"{time.monotonic() - start:.0f} s, last training batch {bits:.3f} bits")


def block_losses(drafter: Drafter, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Cross-entropies [b, k, block_size - 1] in nats of the blocks rooted at anchors int64 [b, k].

    features [b, length, feature_dim]; tokens int64 [b, length]. A block sees the `window` positions before its root and
    itself, so all blocks of a sequence share one set of context rows under a mask.
    """
    b, length = tokens.shape
    size = drafter.block_size
    at = torch.arange(length, device=tokens.device)
    rows = drafter.context(features.flatten(0, 1), at.repeat(b)).unflatten(0, (b, length))
    positions = anchors[:, :, None] + torch.arange(size, device=tokens.device)
    seen = (at < anchors[:, :, None]) & (at >= anchors[:, :, None] - drafter.window)
    block = torch.arange(anchors.shape[1], device=tokens.device).repeat_interleave(size)
    own = (block[:, None] == block).expand(b, -1, -1)
    mask = torch.cat([seen.repeat_interleave(size, 1), own], -1).unsqueeze(1)
    roots = tokens.gather(1, anchors)
    logits = drafter.logits(drafter.blocks(rows, roots, positions, mask))
    labels = tokens.gather(1, positions[:, :, 1:].flatten(1))
    losses = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none")
    return losses.view(b, -1, size - 1)


@torch.no_grad()
def target_features(target: Target, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """[n, length, feature_dim] for uint8 tokens [n, length]; bf16 on a GPU, where it is the largest thing there is."""
    cuda = tokens.is_cuda
    c = target.config
    dtype = torch.bfloat16 if cuda else torch.float32
    out = torch.empty(*tokens.shape, len(layers) * c.hidden_size, device=tokens.device, dtype=dtype)
    for rows in torch.arange(len(tokens), device=tokens.device).split(256):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=cuda):
            out[rows] = target.features(target.residuals(tokens[rows].long()), layers).to(dtype)
    return out
