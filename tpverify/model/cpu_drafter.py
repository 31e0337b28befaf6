"""The drafter on a CPU rank, one request at a time: model/drafter.py's forward by the layers of ops/dense.py."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.model.drafter import Drafter, DraftLayer, rotation
from tpverify.model.mla import Angles
from tpverify.ops import dense


class CpuDrafter:
    """The inference of `drafter`, float32 on the CPU, at positions below max_positions."""

    def __init__(self, drafter: Drafter, max_positions: int) -> None:
        self.config = drafter.config
        self.window, self.feature_layers = drafter.window, drafter.feature_layers
        self.feature_dim, self.context_dim = drafter.feature_dim, drafter.context_dim
        self.embed, self.mask_embedding = drafter.embed, drafter.mask_embedding.detach()
        self.feature_proj, self.feature_norm = _linear(drafter.feature_proj), drafter.feature_norm.weight.detach()
        self.layers = [CpuDraftLayer(cast(DraftLayer, layer)) for layer in drafter.layers]
        self.norm, self.head = drafter.norm.weight.detach(), dense.Linear(drafter.embed)
        cos, sin = rotation(torch.arange(max_positions + drafter.block_size), drafter.config)
        self.cos, self.sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def context(self, features: Tensor, first: int) -> Tensor:
        """features [n, feature_dim] at positions first, first + 1, ... -> rows [n, context_dim], as Drafter's."""
        eps = self.config.rms_norm_eps
        hidden = dense.rms_norm(self.feature_proj(features), self.feature_norm, eps)
        angles = self._angles(first, features.shape[0])
        parts = [part.flatten(1) for layer in self.layers for part in layer.keys_values(hidden, angles, eps)]
        return torch.cat(parts, dim=1)

    def __call__(self, context: Tensor, root: int, position: int) -> Tensor:
        """Logits [block_size - 1, vocab] of the tokens after `root`, which is at `position`.

        context [count, context_dim]: the last committed rows, oldest first, at most `window`.
        """
        eps, block = self.config.rms_norm_eps, self.config.block_size
        x = torch.cat([self.embed[root : root + 1], self.mask_embedding])
        angles = self._angles(position, block)
        for layer, rows in zip(self.layers, context.chunk(len(self.layers), dim=1), strict=True):
            x = layer(x, angles, rows, eps)
        return self.head(dense.rms_norm(x, self.norm, eps)[1:])

    def _angles(self, first: int, count: int) -> Angles:
        return self.cos[first : first + count], self.sin[first : first + count]


class CpuDraftLayer:
    def __init__(self, layer: DraftLayer) -> None:
        self.heads = layer.heads
        self.q_proj, self.k_proj, self.v_proj = _linear(layer.q_proj), _linear(layer.k_proj), _linear(layer.v_proj)
        self.o_proj, self.down = _linear(layer.o_proj), _linear(layer.down_proj)
        self.gate_up = dense.Linear(torch.cat([layer.gate_proj.weight, layer.up_proj.weight]).detach())
        self.q_norm, self.k_norm = layer.q_norm.weight.detach(), layer.k_norm.weight.detach()
        self.input_norm = layer.input_layernorm.weight.detach()
        self.post_attention_norm = layer.post_attention_layernorm.weight.detach()

    def keys_values(self, hidden: Tensor, angles: Angles, eps: float) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> rotated keys and values, both [n, heads, head_dim]."""
        keys = self._rotated(self.k_proj(hidden), self.k_norm, angles, eps)
        return keys, self.v_proj(hidden).view(-1, *self.heads)

    def __call__(self, x: Tensor, angles: Angles, context: Tensor, eps: float) -> Tensor:
        """x [block, hidden]; context [count, 2 heads head_dim]: keys, then values, of committed positions."""
        hidden = dense.rms_norm(x, self.input_norm, eps)
        q = self._rotated(self.q_proj(hidden), self.q_norm, angles, eps)
        before = context.unflatten(1, (2, *self.heads)).unbind(1)
        own = self.keys_values(hidden, angles, eps)
        k, v = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(before, own, strict=True))
        attended = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v)[0]
        x = self.o_proj(attended.transpose(0, 1).flatten(1), add=x)
        gate_up = self.gate_up(dense.rms_norm(x, self.post_attention_norm, eps))
        return self.down(dense.silu_mul(gate_up), add=x)

    def _rotated(self, x: Tensor, norm: Tensor, angles: Angles, eps: float) -> Tensor:
        """[n, heads head_dim], normed by heads and rotated -> [n, heads, head_dim]."""
        normed = dense.rms_norm(x.view(-1, self.heads[1]), norm, eps)
        return dense.rope(normed.view(-1, *self.heads), *angles, interleaved=False)


def _linear(layer: torch.nn.Linear) -> dense.Linear:
    return dense.Linear(layer.weight.detach())
