"""Every attention layer of a model of Kimi-K2's size, and nothing between them: a step's cost at real depth and width.

Weights are random and made where they are used, the same for every number of ranks. Feed-forward layers are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.config import check_choice
from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.mla import NORM_EPS

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
VIRTUAL_SHARDS = 8  # of the heads: a product has the same shape, and so the same bits, whatever a rank's share is
PARTS = ("gemm", "attention", "gather", "rest")

Attend = Callable[[int, Tensor, Tensor], None]  # layer, q [n, local heads, row_dim], out [n, local heads, kv_lora_rank]
Gather = Callable[[Tensor], Tensor]  # [local heads, n, v_head_dim] -> [heads, n, v_head_dim]


@dataclass(frozen=True)
class LayerWeights:
    """Matrices as torch.mm takes them, input first. q_b, w_uk and w_uv: one for each of the rank's virtual shards."""

    norm: Tensor
    q_a: Tensor
    q_a_norm: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    q_b: list[Tensor]  # [q_lora_rank, heads * qk_head_dim]
    w_uk: list[Tensor]  # [heads, qk_nope_head_dim, kv_lora_rank]
    w_uv: list[Tensor]  # [heads, kv_lora_rank, v_head_dim]
    o_proj: Tensor


@dataclass
class Buffers:
    """Of a pass over n nodes. Random until written: a pass without all its parts reads them as they are."""

    x: Tensor  # [n, hidden], the residual stream
    normed: Tensor
    low: Tensor  # [n, q_lora_rank]
    low_normed: Tensor
    kv: Tensor  # [n, row_dim], before norm and rotation
    q_b: Tensor  # [shards, n, heads of a shard, qk_head_dim]
    q: Tensor  # [local heads, n, row_dim]: heads first, so that a shard's strides do not depend on the other heads
    out: Tensor  # [local heads, n, kv_lora_rank]
    values: Tensor  # [local heads, n, v_head_dim]
    all_values: Tensor  # [heads, n, v_head_dim]
    attended: Tensor  # [n, heads, v_head_dim]


class AttentionStack:
    """Rank `rank` of `size`: its virtual shards of the heads, and everything else whole.

    parts: what a pass does, of PARTS, so that each can be timed alone. Raises ArgumentError.
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
            check_choice("parts", part, PARTS)
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
        self.norm = self._draw(1, config.hidden_size)
        self.head = self._draw(2, config.hidden_size, config.vocab_size)
        self.layers = [self._make(layer) for layer in range(config.num_hidden_layers)]
        exponents = torch.arange(0, config.qk_rope_head_dim, 2, device=device) / config.qk_rope_head_dim
        self._frequencies = config.rope_theta**-exponents
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _make(self, layer: int) -> LayerWeights:
        c, heads, name = self.config, self.shard_heads, 100 * (layer + 1)
        return LayerWeights(
            norm=self._draw(name, c.hidden_size),
            q_a=self._draw(name + 1, c.hidden_size, self._q_lora_rank),
            q_a_norm=self._draw(name + 2, self._q_lora_rank),
            kv_a=self._draw(name + 3, c.hidden_size, self.row_dim),
            kv_a_norm=self._draw(name + 4, c.kv_lora_rank),
            q_b=[self._draw(name + 10 + s, self._q_lora_rank, heads * c.qk_head_dim) for s in self.shards],
            w_uk=[self._draw(name + 20 + s, heads, c.qk_nope_head_dim, c.kv_lora_rank) for s in self.shards],
            w_uv=[self._draw(name + 30 + s, heads, c.kv_lora_rank, c.v_head_dim) for s in self.shards],
            o_proj=self._draw(name + 5, c.num_attention_heads * c.v_head_dim, c.hidden_size),
        )

    def _draw(self, name: int, *shape: int) -> Tensor:
        """Weights that keep the size of what they multiply: around 1 for a norm, else by the inputs' number."""
        generator = torch.Generator(self._device).manual_seed(1_000_000 * self._seed + name)
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return drawn.mul_(0.1).add_(1) if len(shape) == 1 else drawn.mul_(shape[-2] ** -0.5)

    def buffers(self, n: int) -> Buffers:
        c = self.config
        shapes = {
            "x": (n, c.hidden_size), "normed": (n, c.hidden_size), "low": (n, self._q_lora_rank),
            "low_normed": (n, self._q_lora_rank), "kv": (n, self.row_dim),
            "q_b": (len(self.shards), n, self.shard_heads, c.qk_head_dim), "q": (self.local_heads, n, self.row_dim),
            "out": (self.local_heads, n, c.kv_lora_rank), "values": (self.local_heads, n, c.v_head_dim),
            "all_values": (c.num_attention_heads, n, c.v_head_dim),
            "attended": (n, c.num_attention_heads, c.v_head_dim),
        }  # fmt: skip
        return Buffers(**{k: torch.randn(shape, device=self._device, dtype=self._dtype) for k, shape in shapes.items()})

    def __call__(
        self, b: Buffers, tokens: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, attend: Attend, gather: Gather
    ) -> Tensor:
        """tokens, positions, rows int64 [n] -> normed hidden states [n, hidden]; latents go to pool[:, rows].

        pool [layers, slots, row_dim]. On a GPU everything is enqueued, and may be captured in a CUDA graph.
        """
        b.x = self.embed[tokens]
        angles = positions[:, None] * self._frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)
        for layer, weights in enumerate(self.layers):
            self._queries_and_latents(weights, b, rotation, rows, pool[layer])
            if "attention" in self._parts:
                attend(layer, b.q.transpose(0, 1), b.out.transpose(0, 1))
            self._add_values(weights, b, gather)
        return self._normed(b.x, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [n, hidden] -> [n, vocab]."""
        return hidden @ self.head

    def _queries_and_latents(self, w: LayerWeights, b: Buffers, rotation: Tensor, rows: Tensor, pool: Tensor) -> None:
        gemm, rest = "gemm" in self._parts, "rest" in self._parts
        nope, latent = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        if rest:
            b.normed = self._normed(b.x, w.norm, self.config.rms_norm_eps)
        with self._aside():
            if gemm:
                torch.mm(b.normed, w.kv_a, out=b.kv)
            if rest:
                row = [self._normed(b.kv[:, :latent], w.kv_a_norm, NORM_EPS), _rotated(b.kv[:, latent:], rotation)]
                pool.index_copy_(0, rows, torch.cat(row, dim=1))
        if gemm:
            torch.mm(b.normed, w.q_a, out=b.low)
        if rest:
            b.low_normed = self._normed(b.low, w.q_a_norm, NORM_EPS)
        if gemm:
            for shard, q_b in enumerate(w.q_b):
                torch.mm(b.low_normed, q_b, out=b.q_b[shard].flatten(1))
        with self._aside():
            if rest:
                rotated = _rotated(b.q_b[..., nope:], rotation[:, None])
                b.q.unflatten(0, (-1, self.shard_heads))[..., latent:] = rotated.transpose(1, 2)
        if gemm:
            for shard, w_uk in enumerate(w.w_uk):
                absorbed = b.q[self._heads(shard), :, :latent]
                torch.bmm(b.q_b[shard, :, :, :nope].transpose(0, 1), w_uk, out=absorbed)
        self._join()

    def _add_values(self, w: LayerWeights, b: Buffers, gather: Gather) -> None:
        gemm = "gemm" in self._parts
        if gemm:
            for shard, w_uv in enumerate(w.w_uv):
                heads = self._heads(shard)
                torch.bmm(b.out[heads], w_uv, out=b.values[heads])
        if "gather" in self._parts:
            b.all_values = gather(b.values)
        if "rest" in self._parts:
            b.attended.copy_(b.all_values.transpose(0, 1))
        if gemm:
            b.x.addmm_(b.attended.flatten(1), w.o_proj)

    def _heads(self, shard: int) -> slice:
        """Of the rank's `shard`th virtual shard, among its own."""
        return slice(shard * self.shard_heads, (shard + 1) * self.shard_heads)

    @staticmethod
    def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a second stream, beside what follows, until _join: small kernels then cost no time of their own."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x [..., rope_dim], neighbours as pairs, each turned by its number of complex [..., rope_dim / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
