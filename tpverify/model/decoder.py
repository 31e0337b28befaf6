"""The target model on one rank: a shard of the attention heads for all rows, everything else for a share of the rows.

CPU ranks compute in float32 from the stored weights, and every layer keeps rows independent (ops/dense.py), so hidden
states are the same bits for every tp, batch, chunking and tree that a token can come in.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.mla import Angles, MlaAttention, Rope
from tpverify.model.parallel import TensorParallel
from tpverify.ops import dense

LayerAttend = Callable[[int, Tensor, Tensor], Tensor]  # layer, the layer's new cache rows, absorbed q -> out


class Decoder:
    """tensors: the checkpoint's, by name. Rank r of a group has heads r * H / size up to the next rank's."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], group: TensorParallel) -> None:
        if config.num_attention_heads % group.size:
            raise ArgumentError("tp", f"a divisor of the {config.num_attention_heads} heads", group.size)
        self.config, self.group = config, group
        local_heads = config.num_attention_heads // group.size
        self.rope = Rope(config)
        self.embed = tensors["model.embed_tokens.weight"].float()
        self.layers = [
            DecoderLayer(
                config, _below(f"model.layers.{layer}.", tensors), self.rope, group.rank * local_heads, local_heads
            )
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = tensors["model.norm.weight"].float()
        self.head = dense.Linear(self.embed if config.tie_word_embeddings else tensors["lm_head.weight"].float())

    def __call__(self, tokens: Tensor, positions: Tensor, attend: LayerAttend, layers: Sequence[int]) -> Tensor:
        """tokens, positions int64 [n] -> [n, (len(layers) + 1) hidden]: the residual stream after each of `layers`,
        counted from 1, and then the normed hidden states that the head reads."""
        own = self.group.own(tokens.shape[0])
        return self.forward(F.embedding(tokens[own], self.embed), self.rope.angles(positions), attend, layers)

    def forward(self, x: Tensor, angles: Angles, attend: LayerAttend, layers: Sequence[int]) -> Tensor:
        """The same from the embeddings of own rows [own, hidden] and the angles of all n. Can be recorded
        (dense.Recording) if `attend` can."""
        n, hidden = angles[0].shape[0], self.config.hidden_size
        own = self.group.own(n)
        own_angles = angles[0][own], angles[1][own]
        states = x.new_empty(x.shape[0], (len(layers) + 1) * hidden)
        columns = states.split_with_sizes([hidden] * (len(layers) + 1), dim=1)
        for index, layer in enumerate(self.layers):
            x = layer(x, own_angles, angles, functools.partial(attend, index), self.group)
            for column, wanted in zip(columns[:-1], layers, strict=True):
                if wanted == index + 1:
                    dense.place(x, column)
        dense.rms_norm(x, self.norm, self.config.rms_norm_eps, columns[-1])
        return self.group.all_rows(states, n)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] -> logits [n, vocab]."""
        return self.head(hidden)


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], rope: Rope, first_head: int, heads: int
    ) -> None:
        self.eps = config.rms_norm_eps
        self.attention = MlaAttention(config, _below("self_attn.", weights), rope, first_head, heads)
        self.input_norm = weights["input_layernorm.weight"]
        self.post_attention_norm = weights["post_attention_layernorm.weight"]
        self.gate_up = dense.Linear(torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]))
        self.down = dense.Linear(weights["mlp.down_proj.weight"])

    def __call__(
        self,
        x: Tensor,
        own_angles: Angles,
        angles: Angles,
        attend: Callable[[Tensor, Tensor], Tensor],
        group: TensorParallel,
    ) -> Tensor:
        """x [own rows, hidden] -> the same; attend takes all rows' new cache rows and absorbed queries."""
        config = self.attention.config
        parts = [config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim]
        own = x.new_empty(x.shape[0], sum(parts))
        own_normed, own_latents = own.split_with_sizes(parts, dim=1)
        dense.rms_norm(x, self.input_norm, self.eps, own_normed)
        self.attention.latents(own_normed, own_angles, own_latents)
        normed, latents = group.all_rows(own, angles[0].shape[0]).split_with_sizes(parts, dim=1)

        out = attend(latents, self.attention.queries(normed, angles))
        values = group.own_rows(self.attention.values(out)).flatten(1)
        x = self.attention.o_proj(values, add=x)
        gate_up = self.gate_up(dense.rms_norm(x, self.post_attention_norm, self.eps))
        return self.down(dense.silu_mul(gate_up), add=x)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it, as float32."""
    return {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
