"""Multi-head latent attention with the up-projections absorbed: queries meet the cached latent directly.

Every product runs head by head, so that a head's bits do not depend on how many heads its rank has.
"""

import torch
from torch import Tensor

from tpverify.model.checkpoint import ModelConfig
from tpverify.ops import dense

NORM_EPS = 1e-6  # of the q_a and kv_a norms, whatever config.rms_norm_eps is: transformers builds them so

Angles = tuple[Tensor, Tensor]


class Rope:
    """Rotation by position, from a table: the bits of an angle do not depend on which positions come together."""

    def __init__(self, config: ModelConfig) -> None:
        dim = config.qk_rope_head_dim
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self.interleaved = config.rope_interleave

    def angles(self, positions: Tensor) -> Angles:
        """cos and sin [n, rope_dim / 2] at positions int64 [n]."""
        return self.cos[positions], self.sin[positions]

    def __call__(self, x: Tensor, angles: Angles, out: Tensor | None = None) -> Tensor:
        """x [n, heads, rope_dim]; interleaved pairs are split into halves, then halves are rotated."""
        return dense.rope(x, *angles, self.interleaved, out)


class MlaAttention:
    """One layer's attention for heads first .. first + count - 1. weights: this layer's `self_attn.*` tensors,
    float32."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], rope: Rope, first: int, count: int) -> None:
        self.config, self.rope, self.heads = config, rope, count
        heads = slice(first, first + count)
        q = weights["q_proj.weight"] if config.q_lora_rank is None else weights["q_b_proj.weight"]
        self.q_proj = dense.Linear(q.unflatten(0, (config.num_attention_heads, -1))[heads])
        self.q_a = None
        if config.q_lora_rank is not None:
            self.q_a = dense.Linear(weights["q_a_proj.weight"]), weights["q_a_layernorm.weight"]
        self.kv_a, self.kv_a_norm = dense.Linear(weights["kv_a_proj_with_mqa.weight"]), weights["kv_a_layernorm.weight"]
        kv_b = weights["kv_b_proj.weight"].unflatten(0, (config.num_attention_heads, -1))[heads]
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self.w_uk, self.w_uv = dense.Linear(w_uk.transpose(1, 2)), dense.Linear(w_uv)
        self.o_proj = dense.Linear(weights["o_proj.weight"])

    def latents(self, x: Tensor, angles: Angles, out: Tensor) -> None:
        """x [n, hidden] -> rows for the cache, out [n, row_dim]: normed latents and rotated k_pe."""
        parts = [self.config.kv_lora_rank, self.config.qk_rope_head_dim]
        latent, k_pe = self.kv_a(x).split_with_sizes(parts, dim=1)
        normed, rotated = out.split_with_sizes(parts, dim=1)
        dense.rms_norm(latent, self.kv_a_norm, NORM_EPS, normed)
        self.rope(k_pe[:, None], angles, rotated[:, None])

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """x [n, hidden] -> absorbed queries [n, local heads, row_dim]."""
        config = self.config
        if self.q_a is not None:
            x = dense.rms_norm(self.q_a[0](x), self.q_a[1], NORM_EPS)
        q = self.q_proj(x[:, None].expand(-1, self.heads, -1))
        q_nope, q_pe = q.split_with_sizes([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=2)
        out = x.new_empty(x.shape[0], self.heads, config.kv_lora_rank + config.qk_rope_head_dim)
        absorbed, rotated = out.split_with_sizes([config.kv_lora_rank, config.qk_rope_head_dim], dim=2)
        self.w_uk(q_nope, out=absorbed)
        self.rope(q_pe, angles, rotated)
        return out

    def values(self, out: Tensor) -> Tensor:
        """Attention's out [n, local heads, kv_lora_rank] -> [n, local heads, v_head_dim]."""
        return self.w_uv(out)
