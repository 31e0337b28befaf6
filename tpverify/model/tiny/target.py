"""The target as it is trained: plain multi-head attention over expanded keys, in DeepSeek-V3's parameter names.

Serving runs the same weights with the latent absorbed (model/decoder.py); transformers' DeepseekV3ForCausalLM is the
oracle of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.model.checkpoint import ModelConfig, expected_shapes

# q, k [b, heads, t, qk_head_dim] and v [b, heads, t, v_head_dim] of one layer -> [b, heads, t, v_head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

SHIPPED = ModelConfig(
    vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=560,
    kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, max_position_embeddings=8192,
    tie_word_embeddings=True, eos_token_id=0,
)  # fmt: skip


class Target(nn.Module):
    """Parameters carry the checkpoint's names, so state_dict() is the checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.tie_word_embeddings and config.q_lora_rank is None
        self.config = config
        self.model = Body(config)
        assert {name: tuple(p.shape) for name, p in self.state_dict().items()} == expected_shapes(config)

    @property
    def embed(self) -> Tensor:
        return self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.model.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Causal logits [b, t, vocab] of int64 tokens [b, t]."""
        return self.head(self.residuals(tokens)[-1])

    def residuals(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> list[Tensor]:
        """The residual stream [b, t, hidden] after each layer; positions int64 [b, t] default to 0, 1, 2, ..."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        rope = rotation(positions.flatten(), self.config)
        x = F.embedding(tokens.flatten(), self.embed)
        streams = []
        for index, layer in enumerate(self.layers):
            q, k, v = (t.unflatten(0, tokens.shape).transpose(1, 2) for t in layer.project(x, *rope))
            if attend is None:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                attended = attend(index, q, k, v)
            x = layer.finish(x, attended.transpose(1, 2).flatten(0, 1))
            streams.append(x.unflatten(0, tokens.shape))
        return streams

    def features(self, streams: list[Tensor], layers: tuple[int, ...]) -> Tensor:
        """What the drafter reads: the residual stream after `layers` (counted from 1), concatenated."""
        return torch.cat([streams[layer - 1] for layer in layers], -1)

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.model.norm(x), self.embed)


class Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Layer(nn.Module):
    """A decoder layer in two halves around attention; both work on a flat list of n tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, hidden] -> q, k [n, heads, qk_head_dim] and v [n, heads, v_head_dim], rope applied."""
        c, attn = self.config, self.self_attn
        hidden = self.input_layernorm(x)
        q = attn.q_proj(hidden).unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_pe = attn.kv_a_proj_with_mqa(hidden).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = attn.kv_b_proj(attn.kv_a_layernorm(latent)).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        q_pe, k_pe = rotate(q_pe, cos, sin), rotate(k_pe.unsqueeze(-2), cos, sin)
        k_pe = k_pe.expand(*k_pe.shape[:-2], c.num_attention_heads, -1)
        q, k = torch.cat([q_nope, q_pe.to(v.dtype)], -1), torch.cat([k_nope, k_pe.to(v.dtype)], -1)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual x and attention's [n, heads, v_head_dim] -> the layer's output [n, hidden]."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        hidden = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(hidden)) * self.mlp.up_proj(hidden))


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps=1e-6)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(c.num_attention_heads * c.v_head_dim, c.hidden_size)


class Mlp(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)


def rounded(target: Target) -> Target:
    """A float32 copy whose weights are those a bf16 checkpoint holds."""
    copy = Target(target.config).to(target.device).requires_grad_(False)
    copy.load_state_dict({name: t.to(torch.bfloat16).float() for name, t in target.state_dict().items()})
    return copy


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotation(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [n, 1, qk_rope_head_dim / 2] float32 of int64 positions [n]."""
    dim = config.qk_rope_head_dim
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None, None].float() * config.rope_theta ** (-steps / dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split interleaved pairs into halves, then rotate the halves."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
