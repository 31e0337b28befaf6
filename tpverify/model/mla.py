"""Multi-head latent attention with the up-projections absorbed: queries meet the cached latent directly.

Every product runs head by head, so that a head's bits do not depend on how many heads its rank has.
"""

import torch
from torch import Tensor

from tpverify.model.checkpoint import ModelConfig
from tpverify.ops import gemm

NORM_EPS = 1e-6  # of the q_a and kv_a norms, whatever config.rms_norm_eps is: transformers builds them so


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

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, ..., rope_dim] at positions int64 [n]; interleaved pairs are split into halves, then halves are
        rotated."""
        first, second = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        shape = (len(positions),) + (1,) * (x.dim() - 2) + self.cos.shape[1:]
        cos, sin = self.cos[positions].view(shape), self.sin[positions].view(shape)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MlaAttention:
    """One layer's attention for heads first .. first + count - 1. weights: this layer's `self_attn.*` tensors,
    float32."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], rope: Rope, first: int, count: int) -> None:
        self.config, self.rope = config, rope
        heads = slice(first, first + count)
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        q = weights["q_proj.weight"] if config.q_lora_rank is None else weights["q_b_proj.weight"]
        self.q_proj = list(q.view(config.num_attention_heads, config.qk_head_dim, -1)[heads].contiguous())
        self.q_a = None
        if config.q_lora_rank is not None:
            self.q_a = (weights["q_a_proj.weight"], weights["q_a_layernorm.weight"])
        self.kv_a, self.kv_a_norm = weights["kv_a_proj_with_mqa.weight"], weights["kv_a_layernorm.weight"]
        kv_b = weights["kv_b_proj.weight"].view(config.num_attention_heads, nope + value, config.kv_lora_rank)[heads]
        self.w_uk = list(kv_b[:, :nope].contiguous())  # [nope, rank] a head, onto the query
        self.w_uv = list(kv_b[:, nope:].contiguous())  # [value, rank] a head, from the output
        self.o_proj = weights["o_proj.weight"]

    def latents(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows for the cache [n, row_dim]: the normed latent, then the rotated k_pe."""
        latent, k_pe = gemm.linear(x, self.kv_a).split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return torch.cat([rms_norm(latent, self.kv_a_norm, NORM_EPS), self.rope(k_pe, positions)], dim=-1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Absorbed queries [n, local heads, row_dim]."""
        if self.q_a is not None:
            x = rms_norm(gemm.linear(x, self.q_a[0]), self.q_a[1], NORM_EPS)
        nope = self.config.qk_nope_head_dim
        x = gemm.pad_rows(x)
        per_head = [gemm.matmul(x, q_proj.t()) for q_proj in self.q_proj]
        absorbed = [gemm.matmul(q[:, :nope].contiguous(), w_uk) for q, w_uk in zip(per_head, self.w_uk, strict=True)]
        n = len(positions)
        q_pe = torch.stack([q[:n, nope:] for q in per_head], dim=1)
        return torch.cat([torch.stack(absorbed, dim=1)[:n], self.rope(q_pe, positions)], dim=-1)

    def values(self, out: Tensor) -> Tensor:
        """Attention's out [n, local heads, kv_lora_rank] -> [n, local heads, v_head_dim]."""
        return torch.stack([gemm.linear(out[:, head], w_uv) for head, w_uv in enumerate(self.w_uv)], dim=1)
