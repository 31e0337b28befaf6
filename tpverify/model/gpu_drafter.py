"""The drafter on GPUs: what model/drafter.py computes, for all requests at once, in few and large operations.

Products in bf16, all else in fp32. Pairs that rotate together lie side by side, which no score notices.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.model.drafter import Drafter, DraftLayer
from tpverify.model.gpu_decoder import rms_norm, rope_turns
from tpverify.ops.mla import rotate


class GpuDrafter:
    """drafter: on the CPU, in float32. max_positions: of the target; a block reaches past them by less than its size.

    max_path: the most nodes of a tree's path; a prompt's rows all come from `context`.
    """

    def __init__(
        self, drafter: Drafter, device: torch.device, dtype: torch.dtype, max_positions: int, max_path: int
    ) -> None:
        self.config, self.dtype, self.max_path = drafter.config, dtype, max_path
        self.window, self.block_size, self.feature_layers = drafter.window, drafter.block_size, drafter.feature_layers
        self.feature_dim, self.context_dim = drafter.feature_dim, drafter.context_dim
        self.heads = (drafter.config.num_attention_heads, drafter.config.head_dim)
        self.embed = drafter.embed.to(device, torch.float32)
        self.masks = drafter.mask_embedding.to(device)
        self.feature_proj = drafter.feature_proj.weight.to(device, dtype).t()
        self.feature_norm, self.norm = drafter.feature_norm.weight.to(device), drafter.norm.weight.to(device)
        layers = cast("list[DraftLayer]", list(drafter.layers))
        self.layers = [GpuDraftLayer(layer, device, dtype) for layer in layers]
        self.keys_values = torch.cat([layer.qkv[:, -2 * self.width :] for layer in self.layers], 1)
        self.key_norms = torch.stack([layer.qk_norm[1] for layer in self.layers])
        self.turns = rope_turns(
            drafter.config.head_dim, drafter.config.rope_theta, max_positions + self.block_size, device
        )
        # Keys of a request: `window` earlier rows, then its path's, then its block's.
        self._keys = torch.arange(self.window + max_path + self.block_size, device=device)
        self._block = torch.arange(self.block_size, device=device)

    @property
    def width(self) -> int:
        return self.heads[0] * self.heads[1]

    def context(self, features: Tensor, positions: Tensor) -> Tensor:
        """Rows [n, context_dim] of committed positions int64 [n], from features [n, feature_dim]: per layer the rotated
        keys and then the values."""
        eps = self.config.rms_norm_eps
        hidden = rms_norm((features @ self.feature_proj).float(), self.feature_norm, eps).to(self.dtype)
        rows = hidden @ self.keys_values
        keys = rows.unflatten(1, (len(self.layers), 2, *self.heads))[:, :, 0]
        normed = F.rms_norm(keys.float(), self.heads[1:], eps=eps) * self.key_norms
        keys.copy_(rotate(normed, self.turns[positions][:, None, None]))
        return rows

    def __call__(self, rows: Tensor, earlier: Tensor, path: Tensor, roots: Tensor, positions: Tensor) -> Tensor:
        """Logits float32 [b, block_size - 1, vocab], as Drafter's.

        rows [b, window + max_path, context_dim]: the last committed rows before a step, oldest first, of which the last
        `earlier` int64 [b] before the path's are valid; then the path's own, the first `path` int64 [b] of them. All
        are finite. roots, positions int64 [b]: the token after them all, and its position.
        """
        eps, b = self.config.rms_norm_eps, len(roots)
        first = torch.maximum(self.window - earlier, path)[:, None]  # of the last `window` rows
        seen = (self._keys >= first) & (self._keys < self.window + path[:, None])
        seen |= self._keys >= self.window + self.max_path
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        bias = bias[:, None, None].expand(-1, self.heads[0], self.block_size, -1)

        x = torch.cat([F.embedding(roots[:, None], self.embed), self.masks.expand(b, -1, -1)], 1).flatten(0, 1)
        turns = self.turns[(positions[:, None] + self._block).flatten()][:, None, None]
        context = rows.unflatten(2, (len(self.layers), 2, *self.heads)).transpose(1, 4)
        for index, layer in enumerate(self.layers):
            keys, values = context[:, :, index].unbind(2)  # [b, heads, rows, head_dim]
            x = layer(x, turns, keys, values, bias)
        hidden = x.unflatten(0, (b, self.block_size))[:, 1:]
        return F.linear(rms_norm(hidden, self.norm, eps), self.embed)


class GpuDraftLayer:
    def __init__(self, layer: DraftLayer, device: torch.device, dtype: torch.dtype) -> None:
        self.heads, self.eps = layer.heads, layer.input_layernorm.eps or 0.0

        def paired(rows: Tensor) -> Tensor:
            """[..., head_dim] halves -> pairs."""
            return rows.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)

        def of_pairs(linear: nn.Linear) -> Tensor:
            return paired(linear.weight.t().unflatten(1, self.heads)).flatten(1)

        def weights(*parts: Tensor) -> Tensor:
            """[in, out], laid out by output."""
            return torch.cat(parts, 1).to(device, dtype).t().contiguous().t()

        self.qkv = weights(of_pairs(layer.q_proj), of_pairs(layer.k_proj), layer.v_proj.weight.t())
        self.qk_norm = torch.stack([paired(layer.q_norm.weight), paired(layer.k_norm.weight)])[:, None].to(device)
        self.o_proj = weights(layer.o_proj.weight.t())
        self.gate_up = weights(layer.gate_proj.weight.t(), layer.up_proj.weight.t())
        self.down = weights(layer.down_proj.weight.t())
        self.input_norm = layer.input_layernorm.weight.to(device)
        self.post_attention_norm = layer.post_attention_layernorm.weight.to(device)

    def __call__(self, x: Tensor, turns: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """x float32 [b * block, hidden]; turns complex [b * block, 1, 1, head_dim / 2]; keys, values [b, heads, rows,
        head_dim] of the context; bias [b, heads, block, rows + block]."""
        dtype, b = self.qkv.dtype, len(keys)
        qkv = (rms_norm(x, self.input_norm, self.eps).to(dtype) @ self.qkv).unflatten(1, (3, *self.heads))
        qk = rotate(F.rms_norm(qkv[:, :2].float(), self.heads[1:], eps=self.eps) * self.qk_norm, turns).to(dtype)
        q, k, v = (t.unflatten(0, (b, -1)).transpose(1, 2) for t in (*qk.unbind(1), qkv[:, 2]))
        k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + attended.transpose(1, 2).flatten(2).flatten(0, 1) @ self.o_proj
        gate, up = (rms_norm(x, self.post_attention_norm, self.eps).to(dtype) @ self.gate_up).chunk(2, dim=1)
        return x + (F.silu(gate) * up) @ self.down
