"""The target model on one rank: all of every layer but the attention heads, of which it has a shard.

CPU ranks compute in float32 from the stored weights, and every product keeps rows independent (ops/gemm.py), so hidden
states are the same bits for every tp, batch, chunking and tree that a token can come in.
"""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.mla import Gather, MlaAttention, Rope, rms_norm
from tpverify.ops import gemm

LayerAttend = Callable[[int, Tensor, Tensor], Tensor]  # layer, the layer's new cache rows, absorbed q -> out


class Decoder:
    """tensors: the checkpoint's, by name. Rank tp_rank of tp_size has heads tp_rank * H/tp_size up to the next
    rank's."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], tp_rank: int = 0, tp_size: int = 1) -> None:
        if config.num_attention_heads % tp_size:
            raise ArgumentError("tp", f"a divisor of the {config.num_attention_heads} heads", tp_size)
        self.config = config
        local_heads = config.num_attention_heads // tp_size
        rope = Rope(config)
        self.embed = tensors["model.embed_tokens.weight"].float()
        self.layers = [
            DecoderLayer(config, _below(f"model.layers.{layer}.", tensors), rope, tp_rank * local_heads, local_heads)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = tensors["model.norm.weight"].float()
        self.head = self.embed if config.tie_word_embeddings else tensors["lm_head.weight"].float()

    def __call__(self, tokens: Tensor, positions: Tensor, attend: LayerAttend, gather: Gather) -> list[Tensor]:
        """tokens, positions int64 [n] -> the residual stream [n, hidden] after each layer."""
        # Whole blocks of rows all the way: an elementwise or reducing kernel then never meets a ragged end.
        n = len(tokens)
        x = gemm.pad_rows(F.embedding(tokens, self.embed))
        streams = []
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, functools.partial(attend, index), gather)
            streams.append(x[:n])
        return streams

    def final(self, stream: Tensor) -> Tensor:
        """The last layer's stream [n, hidden] -> the normed hidden states that the head reads."""
        return rms_norm(gemm.pad_rows(stream), self.norm, self.config.rms_norm_eps)[: len(stream)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] -> logits [n, vocab]."""
        return gemm.linear(hidden, self.head)


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], rope: Rope, first_head: int, heads: int
    ) -> None:
        self.eps = config.rms_norm_eps
        self.attention = MlaAttention(config, _below("self_attn.", weights), rope, first_head, heads)
        self.input_norm = weights["input_layernorm.weight"].float()
        self.post_attention_norm = weights["post_attention_layernorm.weight"].float()
        self.gate, self.up, self.down = (weights[f"mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))

    def __call__(
        self, x: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor], Tensor], gather: Gather
    ) -> Tensor:
        """x [padded n, hidden] -> the same; attend takes the layer's new cache rows and the absorbed queries."""
        n = len(positions)
        normed = rms_norm(x, self.input_norm, self.eps)[:n]
        rows = self.attention.latents(normed, positions)
        attended = self.attention(normed, positions, lambda q: attend(rows, q), gather)
        x = x + F.pad(attended, (0, 0, 0, len(x) - n))
        normed = rms_norm(x, self.post_attention_norm, self.eps)
        return x + gemm.matmul(
            F.silu(gemm.matmul(normed, self.gate.t())) * gemm.matmul(normed, self.up.t()), self.down.t()
        )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it, as float32."""
    return {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
