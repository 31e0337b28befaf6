"""The target model on GPUs: bf16 weights and activations, fp32 sums, residual stream, norms and logits.

Heads come in virtual shards, as many at every tp. A rank runs its own shards one by one, each with the same GEMM shapes
whatever the others are, gathers the heads' outputs after W_UV and repeats all else. So tp changes no bit of a step.
Shapes are those of a bucket: nothing waits for the device, and a step can be a CUDA graph.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.model.checkpoint import ModelConfig
from tpverify.model.mla import NORM_EPS
from tpverify.ops.mla import rotate

VIRTUAL_SHARDS = 8

# layer, the layer's new cache rows [n, row_dim], absorbed q [n, local heads, row_dim], out [n, local heads, rank]
AttendInto = Callable[[int, Tensor, Tensor, Tensor], None]
GatherInto = Callable[[Tensor, Tensor], None]  # every rank's x, of one shape, into out [size, *x.shape]


def virtual_shards(heads: int) -> int:
    """How many shards the heads come in: 8, or the greatest common divisor. tp must divide it."""
    return math.gcd(heads, VIRTUAL_SHARDS)


class GpuDecoder:
    """Rank `rank` of `size`. tensors: the checkpoint's, by name.

    dtype: of weights, activations and cache; bfloat16 is what kernels take. gather: not used by one rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        rank: int = 0,
        size: int = 1,
        gather: GatherInto | None = None,
    ) -> None:
        count = virtual_shards(config.num_attention_heads)
        assert count % size == 0 and (size == 1 or gather is not None)
        self.config, self.size, self.gather = config, size, gather
        own = range(rank * count // size, (rank + 1) * count // size)
        weights = Weights(tensors, device, dtype)
        side = Branches(device, len(own))
        self.layers = [
            GpuLayer(config, weights.below(f"model.layers.{index}."), own, side)
            for index in range(config.num_hidden_layers)
        ]
        self.embed = weights.exact("model.embed_tokens")
        self.norm = weights.exact("model.norm")
        self.head = self.embed if config.tie_word_embeddings else weights.exact("lm_head")
        self.turns = rope_turns(config.qk_rope_head_dim, config.rope_theta, config.max_position_embeddings, device)

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: AttendInto, layers: Sequence[int], features: Tensor | None
    ) -> Tensor:
        """tokens, positions int64 [n] -> normed hidden states float32 [n, hidden], which the head reads.

        features [n, len(layers) hidden], of any dtype, is given the residual stream after each of `layers`, counted
        from 1.
        """
        x = F.embedding(tokens, self.embed)
        turns = self.turns[positions]
        width = self.config.hidden_size
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, partial(attend, index), self._all_shards)
            if features is not None and index + 1 in layers:
                place = layers.index(index + 1)
                features[:, place * width : (place + 1) * width] = x
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def _all_shards(self, own: Tensor) -> Tensor:
        """[own shards, ...] -> [shards, ...]."""
        if self.size == 1:
            return own
        everyone = own.new_empty(self.size, *own.shape)
        self.gather(own, everyone)  # type: ignore[misc]
        return everyone.flatten(0, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] -> logits float32 [n, vocab]."""
        return F.linear(hidden, self.head)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors on a device. dtype: of what products of that dtype read."""

    tensors: dict[str, Tensor]
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""  # of all names

    def below(self, prefix: str) -> "Weights":
        return replace(self, prefix=self.prefix + prefix)

    def rounded(self, name: str) -> Tensor:
        return self._of(name).to(self.device, self.dtype)

    def exact(self, name: str) -> Tensor:
        """In float32, of whatever the checkpoint has: norms, embeddings, the head."""
        return self._of(name).to(self.device, torch.float32)

    def _of(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]


class GpuLayer:
    """weights: of the layer. own: numbers of this rank's shards."""

    def __init__(self, config: ModelConfig, weights: Weights, own: range, side: "Branches") -> None:
        c = config
        self.config, self.side, self.shards = config, side, len(own)
        self.heads = c.num_attention_heads // virtual_shards(c.num_attention_heads)  # of a shard

        def of_own(by_head: Tensor) -> list[Tensor]:
            """[heads, ...] -> [heads of a shard, ...] for each own shard."""
            return list(by_head.split(self.heads)[own.start : own.stop])

        def paired(rows: Tensor) -> Tensor:
            """Rows [..., rope_dim, in] so that the two of a pair lie side by side, as rotation by a complex number
            takes them. q and k agree on the order, so no score changes."""
            return rows if c.rope_interleave else rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)

        weight = weights.rounded
        self.input_norm = weights.exact("input_layernorm")
        self.post_attention_norm = weights.exact("post_attention_layernorm")
        self.q_a = None
        if c.q_lora_rank is not None:
            self.q_a = weight("self_attn.q_a_proj").t(), weights.exact("self_attn.q_a_layernorm")
        q = weight("self_attn.q_b_proj" if self.q_a else "self_attn.q_proj").unflatten(0, (c.num_attention_heads, -1))
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], 1)
        q = torch.cat([q_nope, paired(q_pe)], 1)
        self.q_proj = [part.flatten(0, 1).contiguous().t() for part in of_own(q)]
        kv_a, k_pe = weight("self_attn.kv_a_proj_with_mqa").split([c.kv_lora_rank, c.qk_rope_head_dim])
        self.kv_a = torch.cat([kv_a, paired(k_pe)]).t()
        self.kv_a_norm = weights.exact("self_attn.kv_a_layernorm")
        kv_b = weight("self_attn.kv_b_proj").unflatten(0, (c.num_attention_heads, -1))
        self.w_uk = [part[:, : c.qk_nope_head_dim].contiguous() for part in of_own(kv_b)]
        self.w_uv = [part[:, c.qk_nope_head_dim :].contiguous().transpose(1, 2) for part in of_own(kv_b)]
        self.o_proj = weight("self_attn.o_proj").t()
        self.gate_up = torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]).t()
        self.down = weight("mlp.down_proj").t()

    def __call__(
        self,
        x: Tensor,
        turns: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], None],
        all_shards: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """x float32 [n, hidden] -> the same after the layer; turns complex [n, rope_dim / 2]."""
        eps = self.config.rms_norm_eps
        values = all_shards(self._attention(rms_norm(x, self.input_norm, eps).to(self.kv_a.dtype), turns, attend))
        x = x + values.flatten(0, 1).t() @ self.o_proj
        gate, up = (rms_norm(x, self.post_attention_norm, eps).to(values.dtype) @ self.gate_up).chunk(2, dim=1)
        return x + (F.silu(gate) * up) @ self.down

    def _attention(self, x: Tensor, turns: Tensor, attend: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
        """[n, hidden] -> values [own shards, heads of a shard x v_head_dim, n]: of all shards, its axes swapped, that
        is the output projection's input as it lies."""
        c, n, shards, heads = self.config, len(x), self.shards, self.heads
        source = x
        if self.q_a is not None:
            source = rms_norm((x @ self.q_a[0]).float(), self.q_a[1], NORM_EPS).to(x.dtype)
        projected = x.new_empty(shards, n, heads * c.qk_head_dim)
        q = x.new_empty(shards, heads, n, c.kv_lora_rank + c.qk_rope_head_dim)
        q_nope, q_pe = projected.unflatten(2, (heads, -1)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=3)

        def absorb(shard: int) -> None:
            torch.mm(source, self.q_proj[shard], out=projected[shard])
            torch.bmm(q_nope[shard].transpose(0, 1), self.w_uk[shard], out=q[shard, :, :, : c.kv_lora_rank])

        with self.side.beside(absorb):
            latent, k_pe = (x @ self.kv_a).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=1)
            rows = x.new_empty(n, c.kv_lora_rank + c.qk_rope_head_dim)
            rows[:, : c.kv_lora_rank] = rms_norm(latent.float(), self.kv_a_norm, NORM_EPS)
            rows[:, c.kv_lora_rank :] = rotate(k_pe, turns)
        q[:, :, :, c.kv_lora_rank :] = rotate(q_pe, turns[:, None]).transpose(1, 2)

        out = x.new_empty(shards, heads, n, c.kv_lora_rank)
        attend(rows, q.flatten(0, 1).transpose(0, 1), out.flatten(0, 1).transpose(0, 1))
        values = x.new_empty(shards, heads * c.v_head_dim, n)
        by_head = values.unflatten(1, (heads, -1)).transpose(2, 3)
        with self.side.beside(lambda shard: torch.bmm(out[shard], self.w_uv[shard], out=by_head[shard])):
            pass
        return values


class Branches:
    """Pieces of work that need nothing of each other: side by side on a GPU, one after another elsewhere.

    A GEMM of one shard keeps a few of a GPU's multiprocessors busy. In a CUDA graph the streams become branches.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.count = count
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" and count > 1 else []

    @contextmanager
    def beside(self, body: Callable[[int], object]) -> Iterator[None]:
        """body(0), ..., body(count - 1) beside what the `with` block does; all are done for whatever follows it."""
        if not self._streams:
            for index in range(self.count):
                body(index)
            yield
            return
        main = torch.cuda.current_stream()
        for index, stream in enumerate(self._streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                body(index)
        yield
        for stream in self._streams:
            main.wait_stream(stream)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, all in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rope_turns(dim: int, theta: float, positions: int, device: torch.device) -> Tensor:
    """complex64 [positions, dim / 2]: what a pair of a row is multiplied by at each position."""
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.complex(angles.cos(), angles.sin()).to(device)
