"""Every attention layer of a model of Kimi-K2's size, and nothing between them: a step's cost at real depth and width.

Weights are random and made where they are used, the same for every number of ranks. Feed-forward layers are left out.

A norm is a row's scale here: its weights are the next matrix's, and a scale can wait until after a product. Values are
written node by node in the last axis: then the gather of all heads is, as it lies, the output projection's input, its
axes swapped. So all that a layer does beside products, attention and gather is one small kernel (ops/mla.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.config import check_choice
from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.gpu_decoder import VIRTUAL_SHARDS
from tpverify.model.mla import NORM_EPS
from tpverify.ops.mla import rope_cache

# huggingface.co/moonshotai/Kimi-K2-Instruct, but for a vocabulary of 163,840.
KIMI_K2 = ModelConfig(
    vocab_size=8192,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    intermediate_size=18432,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=131072,
    q_lora_rank=1536,
    rope_theta=50000.0,
)
PARTS = ("gemm", "attention", "gather", "rest")
PAUSE, PAUSE_CYCLES = "pause", 4_000_000  # 2 ms of a GPU: it then waits for no launch of what follows

Attend = Callable[[int, Tensor, Tensor], None]  # layer, q [n, local heads, row_dim], out [n, local heads, kv_lora_rank]
Gather = Callable[[Tensor], Tensor]  # [local heads, v_head_dim, n] -> [heads, v_head_dim, n]
ALIGNED = 8  # nodes that a pass on a GPU is padded to: products of rows that begin at no multiple of 16 bytes are slow


@dataclass(frozen=True)
class LayerWeights:
    """Matrices as torch.mm takes them, input first. q_b, w_uk and w_uv: one for each of the rank's virtual shards."""

    down: Tensor  # [hidden, q_lora_rank + row_dim]: of the queries, the latent, and the key's rotated part
    q_b: list[Tensor]  # [q_lora_rank, heads * qk_head_dim]
    w_uk: list[Tensor]  # [heads, qk_nope_head_dim, kv_lora_rank]
    w_uv: list[Tensor]  # [heads, kv_lora_rank, v_head_dim]
    o_proj: Tensor


@dataclass
class Buffers:
    """Of a pass over n nodes. Random until written: a pass without all its parts reads them as they are."""

    x: Tensor  # [n, hidden], the residual stream
    rotation: Tensor  # float32 [n, qk_rope_head_dim / 2, 2], of the nodes' positions
    down: Tensor  # [n, q_lora_rank + row_dim], before norms and rotation
    q_b: Tensor  # [shards, n, heads of a shard, qk_head_dim], before norm and rotation
    nope: Tensor  # [shards, n, heads of a shard, qk_nope_head_dim]
    q: Tensor  # [local heads, n, row_dim]: heads first, so that a shard's strides do not depend on the other heads
    out: Tensor  # [local heads, n, kv_lora_rank]
    values: Tensor  # [local heads, v_head_dim, n]
    all_values: Tensor  # [heads, v_head_dim, n]


class AttentionStack:
    """Rank `rank` of `size`: its virtual shards of the heads, and everything else whole.

    parts: what a pass does, of PARTS, so that each can be timed alone, and PAUSE to begin with. Raises ArgumentError.
    """

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        parts: Sequence[str] = PARTS,
    ) -> None:
        for part in parts:
            check_choice("parts", part, (*PARTS, PAUSE))
        if VIRTUAL_SHARDS % size:
            raise ArgumentError("tp", f"a divisor of {VIRTUAL_SHARDS}", size)
        if config.num_attention_heads % VIRTUAL_SHARDS or config.q_lora_rank is None:
            raise ArgumentError("config", f"a multiple of {VIRTUAL_SHARDS} heads, and a q_lora_rank", config)
        self.config, self._q_lora_rank = config, config.q_lora_rank
        self._parts, self._device, self._dtype, self._seed = set(parts), device, dtype, seed
        self.shard_heads = config.num_attention_heads // VIRTUAL_SHARDS
        self.shards = range(VIRTUAL_SHARDS * rank // size, VIRTUAL_SHARDS * (rank + 1) // size)
        self.local_heads = self.shard_heads * len(self.shards)
        self.row_dim = config.kv_lora_rank + config.qk_rope_head_dim
        self.embed = self._draw(0, config.vocab_size, config.hidden_size)
        self.head = self._draw(2, config.hidden_size, config.vocab_size)
        self.layers = [self._make(layer) for layer in range(config.num_hidden_layers)]
        exponents = torch.arange(0, config.qk_rope_head_dim, 2, device=device) / config.qk_rope_head_dim
        self._frequencies = config.rope_theta**-exponents

    def _make(self, layer: int) -> LayerWeights:
        c, heads, name = self.config, self.shard_heads, 100 * (layer + 1)
        return LayerWeights(
            down=self._draw(name, c.hidden_size, self._q_lora_rank + self.row_dim),
            q_b=[self._draw(name + 10 + s, self._q_lora_rank, heads * c.qk_head_dim) for s in self.shards],
            w_uk=[self._draw(name + 20 + s, heads, c.qk_nope_head_dim, c.kv_lora_rank) for s in self.shards],
            w_uv=[self._draw(name + 30 + s, heads, c.kv_lora_rank, c.v_head_dim) for s in self.shards],
            o_proj=self._draw(name + 1, c.num_attention_heads * c.v_head_dim, c.hidden_size),
        )

    def _draw(self, name: int, *shape: int) -> Tensor:
        """Weights that keep the size of what they multiply."""
        generator = torch.Generator(self._device).manual_seed(1_000_000 * self._seed + name)
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return drawn.mul_(shape[-2] ** -0.5)

    def buffers(self, n: int) -> Buffers:
        c = self.config
        shapes = {
            "x": (n, c.hidden_size), "down": (n, self._q_lora_rank + self.row_dim),
            "q_b": (len(self.shards), n, self.shard_heads, c.qk_head_dim),
            "nope": (len(self.shards), n, self.shard_heads, c.qk_nope_head_dim),
            "q": (self.local_heads, n, self.row_dim), "out": (self.local_heads, n, c.kv_lora_rank),
            "values": (self.local_heads, c.v_head_dim, n),
            "all_values": (c.num_attention_heads, c.v_head_dim, n),
        }  # fmt: skip
        random = {k: torch.randn(shape, device=self._device, dtype=self._dtype) for k, shape in shapes.items()}
        return Buffers(rotation=torch.randn(n, c.qk_rope_head_dim // 2, 2, device=self._device), **random)

    def __call__(
        self, b: Buffers, tokens: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, attend: Attend, gather: Gather
    ) -> Tensor:
        """tokens, positions, rows int64 [n] -> normed hidden states [n, hidden]; latents go to pool[:, rows].

        pool [layers, slots, row_dim]. On a GPU everything is enqueued, and may be captured in a CUDA graph. The same
        in parts: `enter`, `run` of all layers in order, `leave`.
        """
        self.enter(b, tokens, positions, rows, pool)
        self.run(range(len(self.layers)), b, rows, pool, attend, gather)
        return self.leave(b)

    def enter(self, b: Buffers, tokens: Tensor, positions: Tensor, rows: Tensor, pool: Tensor) -> None:
        """What comes before the first layer's attention, and needs no tables of it."""
        if PAUSE in self._parts:
            torch.cuda._sleep(PAUSE_CYCLES)
        torch.index_select(self.embed, 0, tokens, out=b.x)
        angles = positions[:, None] * self._frequencies
        torch.stack([angles.cos(), angles.sin()], 2, out=b.rotation)
        self._queries_and_latents(0, b, rows, pool)

    def run(self, layers: range, b: Buffers, rows: Tensor, pool: Tensor, attend: Attend, gather: Gather) -> None:
        """From attention in each of these layers to the next layer's."""
        for layer in layers:
            if "attention" in self._parts:
                attend(layer, b.q.transpose(0, 1), b.out.transpose(0, 1))
            self._add_values(self.layers[layer], b, gather)
            if layer + 1 < len(self.layers):
                self._queries_and_latents(layer + 1, b, rows, pool)

    def leave(self, b: Buffers) -> Tensor:
        """Normed hidden states [n, hidden]."""
        return F.rms_norm(b.x, b.x.shape[1:], eps=self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] -> [n, vocab]."""
        return hidden @ self.head

    def _queries_and_latents(self, layer: int, b: Buffers, rows: Tensor, pool: Tensor) -> None:
        """Into b.q and pool[layer, rows]."""
        w, gemm = self.layers[layer], "gemm" in self._parts
        latent, low = self.config.kv_lora_rank, self._q_lora_rank
        if gemm:
            torch.mm(b.x, w.down, out=b.down)
            for shard, q_b in enumerate(w.q_b):
                torch.mm(b.down[:, :low], q_b, out=b.q_b[shard].flatten(1))
        if "rest" in self._parts:
            eps = self.config.rms_norm_eps
            q = b.q.transpose(0, 1)
            rope_cache(b.x, b.down, b.q_b, b.rotation, rows, b.nope, q, pool[layer], eps, NORM_EPS)
        if gemm:
            for shard, w_uk in enumerate(w.w_uk):
                torch.bmm(b.nope[shard].transpose(0, 1), w_uk, out=b.q[self._heads(shard), :, :latent])

    def _add_values(self, w: LayerWeights, b: Buffers, gather: Gather) -> None:
        gemm = "gemm" in self._parts
        if gemm:
            for shard, w_uv in enumerate(w.w_uv):
                heads = self._heads(shard)
                torch.bmm(b.out[heads], w_uv, out=b.values[heads].transpose(1, 2))
        if "gather" in self._parts:
            b.all_values = gather(b.values)
        if gemm:
            b.x.addmm_(b.all_values.flatten(0, 1).t(), w.o_proj)

    def _heads(self, shard: int) -> slice:
        """Of the rank's `shard`th virtual shard, among its own."""
        return slice(shard * self.shard_heads, (shard + 1) * self.shard_heads)
