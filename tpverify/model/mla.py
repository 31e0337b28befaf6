"""Multi-head latent attention with the up-projections absorbed: queries meet the cached latent directly.

Every product runs head by head, so that a head's bits do not depend on how many heads its rank has.
"""

import torch
from torch import Tensor

from tpverify.model.checkpoint import ModelConfig
from tpverify.ops import gemm

NORM_EPS = 1e-6  # of the q_a and kv_a norms, whatever config.rms_norm_eps is: transformers builds them so

Angles = tuple[Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


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

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        """x [..., n, rope_dim]; interleaved pairs are split into halves, then halves are rotated."""
        first, second = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        cos, sin = angles
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MlaAttention:
    """One layer's attention for heads first .. first + count - 1. weights: this layer's `self_attn.*` tensors,
    float32."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], rope: Rope, first: int, count: int) -> None:
        self.config, self.rope = config, rope
        heads = slice(first, first + count)
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        q = weights["q_proj.weight"] if config.q_lora_rank is None else weights["q_b_proj.weight"]
        # A head's weights as its products read them: [hidden, qk_head_dim], [nope, rank] and [rank, value].
        self.q_proj = q.view(config.num_attention_heads, config.qk_head_dim, -1)[heads].transpose(1, 2).contiguous()
        self.q_a = None
        if config.q_lora_rank is not None:
            self.q_a = (gemm.by_input(weights["q_a_proj.weight"]), weights["q_a_layernorm.weight"])
        self.kv_a, self.kv_a_norm = (
            gemm.by_input(weights["kv_a_proj_with_mqa.weight"]),
            weights["kv_a_layernorm.weight"],
        )
        kv_b = weights["kv_b_proj.weight"].view(config.num_attention_heads, nope + value, config.kv_lora_rank)[heads]
        self.w_uk = kv_b[:, :nope].contiguous()
        self.w_uv = kv_b[:, nope:].transpose(1, 2).contiguous()
        self.o_proj = gemm.by_input(weights["o_proj.weight"])

    def latents(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """x [padded n, hidden] -> the two parts of rows for the cache: normed latents and rotated k_pe."""
        latent, k_pe = gemm.linear(x, self.kv_a).split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=1)
        return rms_norm(latent, self.kv_a_norm, NORM_EPS), self.rope(k_pe, angles)

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """x [n, hidden] -> absorbed queries [n, local heads, row_dim]."""
        n, x = len(x), gemm.pad_rows(x)
        if self.q_a is not None:
            x = rms_norm(gemm.linear(x, self.q_a[0]), self.q_a[1], NORM_EPS)
        q = gemm.matmul_heads(x.expand(len(self.q_proj), -1, -1), self.q_proj)
        q_nope, q_pe = q.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=2)
        absorbed = gemm.matmul_heads(q_nope, self.w_uk)
        return torch.cat([absorbed[:, :n], self.rope(q_pe[:, :n], angles)], dim=2).transpose(0, 1)

    def values(self, out: Tensor) -> Tensor:
        """Attention's out [n, local heads, kv_lora_rank] -> [n, local heads, v_head_dim]."""
        return gemm.matmul_heads(gemm.pad_rows(out).transpose(0, 1), self.w_uv)[:, : len(out)].transpose(0, 1)
