"""Shapes of verify attention, and the tensors of one: random rows in random slots, a random tree a request."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpverify.ops.attention import TreeMask, VerifyRequest

LATENT, ROPE, ROW = 512, 64, 576
PAGE = 64  # tokens, of the peers that need pages
SCALE = ROW**-0.5


@dataclass(frozen=True)
class Shape:
    """`batch` requests of `prefix` committed tokens and `nodes` tree nodes each, `heads` query heads. exact as of
    VerifyPlan."""

    prefix: int
    nodes: int
    batch: int = 1
    heads: int = 8
    exact: bool = True

    @property
    def name(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        heads = f", {self.heads} heads" if self.heads != 8 else ""
        fast = "" if self.exact else ", fast"
        return f"{batch}{self.prefix:,} q={self.nodes}{heads}{fast}"

    @property
    def bytes(self) -> int:
        """The least that memory must move: every row of the pool once, q in, out out, in bfloat16."""
        return 2 * self.batch * ((self.prefix + self.nodes) * ROW + self.nodes * self.heads * (ROW + LATENT))

    @property
    def flop(self) -> int:
        """Scores over 576 dims and values over 512, of every row with every token."""
        return 2 * self.batch * self.nodes * self.heads * (self.prefix + self.nodes) * (ROW + LATENT)


PREFIXES, NODES = (4096, 32_768, 185_000), (1, 8, 16, 32, 64)
SHAPES = (
    *(Shape(prefix, nodes) for prefix in PREFIXES for nodes in NODES),
    *(Shape(8192, nodes, batch=8) for nodes in (8, 16, 32)),
    *(Shape(32_768, nodes, batch=8) for nodes in (8, 16)),
    *(Shape(100_000, nodes, heads=64, exact=False) for nodes in (1, 8, 16)),
)


class VerifyCase:
    """bf16 tensors of a shape on `device`. Slots are shuffled over the whole pool; slot 0 is nobody's."""

    def __init__(self, shape: Shape, device: str | torch.device, seed: int = 0) -> None:
        self.shape, self.device = shape, torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)
        rng = random.Random(seed)
        self.tokens = shape.prefix + shape.nodes
        total = shape.batch * self.tokens

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=self.device, generator=generator).bfloat16()

        self.rows = normal(shape.batch, self.tokens, ROW)
        self.q = normal(shape.batch * shape.nodes, shape.heads, ROW)
        self.slots = torch.randperm(total, device=self.device, generator=generator) + 1
        self.slots_by_request = self.slots.view(shape.batch, self.tokens)
        self.pool = self.q.new_zeros(total + 1, ROW)
        self.pool[self.slots] = self.rows.view(total, ROW)
        masks = [random_tree(shape.nodes, rng) for _ in range(shape.batch)]
        self.bits = [torch.from_numpy(bits).to(self.device) for _, bits in masks]
        self.trees = self._requests([mask for mask, _ in masks])
        self.chains = self._requests([TreeMask.chain(shape.nodes)] * shape.batch)

    def _requests(self, masks: Sequence[TreeMask]) -> list[VerifyRequest]:
        prefix = self.shape.prefix
        return [
            VerifyRequest(slots[:prefix], slots[prefix:], mask)
            for slots, mask in zip(self.slots_by_request, masks, strict=True)
        ]

    def _begins(self, size: int) -> Tensor:
        return torch.arange(self.shape.batch + 1, dtype=torch.int32, device=self.device) * size

    @property
    def node_begins(self) -> Tensor:
        return self._begins(self.shape.nodes)

    @property
    def token_begins(self) -> Tensor:
        return self._begins(self.tokens)

    def paged(self) -> tuple[Tensor, Tensor]:
        """The rows in shuffled pages: [pages, PAGE, 1, ROW], and int32 [batch, pages of a request]."""
        each = -(-self.tokens // PAGE)
        pages = torch.randperm(self.shape.batch * each, device=self.device)
        pool = self.q.new_zeros(len(pages), PAGE, 1, ROW)
        padded = self.q.new_zeros(self.shape.batch, each * PAGE, ROW)
        padded[:, : self.tokens] = self.rows
        pool[pages] = padded.view(len(pages), PAGE, 1, ROW)
        return pool, pages.int().view(self.shape.batch, each)

    def error(self, out: Tensor, tree: bool) -> float:
        """Largest relative error against float64 of the first, middle and last node of the first and last request."""
        worst = 0.0
        for request in {0, self.shape.batch - 1}:
            kv = self.rows[request].double()
            seen = torch.ones(self.shape.nodes, self.tokens, dtype=torch.bool, device=self.device)
            seen[:, self.shape.prefix :] = (
                self.bits[request] if tree else seen.new_ones(self.shape.nodes, self.shape.nodes).tril()
            )
            for node in {0, self.shape.nodes // 2, self.shape.nodes - 1}:
                row = request * self.shape.nodes + node
                scores = self.q[row].double() @ kv.T * SCALE
                exact = scores.masked_fill(~seen[node], -torch.inf).softmax(1) @ kv[:, :LATENT]
                worst = max(worst, float((out[row].double() - exact).norm() / exact.norm()))
        return worst


def random_tree(nodes: int, rng: random.Random) -> tuple[TreeMask, np.ndarray]:
    """A tree of chains and fans, and its mask as bool [n, n]."""
    bits = np.zeros((nodes, -(-nodes // 64) * 64), bool)
    depths = np.zeros(nodes, np.int32)
    for node in range(nodes):
        if node:
            parent = rng.randrange(max(0, node - rng.choice((1, 4, nodes))), node)
            bits[node], depths[node] = bits[parent], depths[parent] + 1
        bits[node, node] = True
    return TreeMask(np.packbits(bits, axis=1, bitorder="little").view(np.uint64), depths), bits[:, :nodes].copy()
