"""Tree-masked MLA attention on the CPU, canonical: a row's bits are a function of its own token sequence alone.

A query at position p reads its keys in chunks at absolute multiples of 64. Scores are independent dot products, their
maximum is exact in any order, and P @ V adds chunk after chunk and, within one, row after row in position order. Chunks
that lie wholly in the committed prefix are the same rows for every node and take one product; in the chunks from there
on, each node sees its own ancestors. So a tree node gets the bits that the same token gets when it is decoded alone,
chunked prefill equals decoding, and neither heads, slots nor other requests matter.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.ops import gemm
from tpverify.ops.gemm import CHUNK

ONES = 16  # columns of ones beside V: P @ [V, 1] adds up P in the order in which it adds the rows of V
GROUP = 16 * CHUNK  # prefix rows gathered at a time
KEPT = 8 * GROUP  # prefix rows that stay gathered between Q @ K and P @ V; more are gathered twice
SCORES = 64 << 20  # scores held at a time, 4 bytes each


@dataclass(frozen=True)
class OpenBlock:
    """Some nodes' keys from one open chunk. keys int64 [C], rows of the gathered open keys in position order for every
    node; C is rounded up to whole chunks with the row of zeros.

    hidden: bool [R, C] with R query rows, padded. rows: which query rows, None for all.
    """

    keys: Tensor
    hidden: Tensor
    rows: Tensor | None


class RequestPlan:
    """One request, prepared once for all layers: prefix [S] and tree [n] int64 slots; words uint64 [n, ceil(n/64)]
    ancestor bits; depths int32 [n]; heads query rows a node."""

    def __init__(self, prefix: Tensor, tree: Tensor, words: np.ndarray, depths: np.ndarray, heads: int) -> None:
        self.prefix, self.tree, self.heads, self.nodes = prefix, tree, heads, len(depths)
        self.words, self.depths = words, depths
        self.shared = len(prefix) // CHUNK * CHUNK
        self.open_slots = torch.cat([prefix[self.shared :], tree])
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, count=self.nodes, bitorder="little")
        self._ancestors = bits.view(bool)
        self._positions = len(prefix) + depths.astype(np.int64)
        self.open_blocks = functools.cache(lambda limit: list(self._open_blocks(limit)))

    def _open_blocks(self, limit: int) -> Iterator[OpenBlock]:
        """Chunks where committed rows (if any are left) and each node's own ancestors meet; at most `limit` rows a
        block, but always those of one node."""
        for start in range(self.shared, int(self._positions.max()) + 1, CHUNK):
            committed = max(0, len(self.prefix) - start)
            columns = np.flatnonzero((self._positions >= start) & (self._positions < start + CHUNK))
            nodes = np.flatnonzero(self._positions >= start)
            visible = np.ones((len(nodes), committed + len(columns)), bool)
            visible[:, committed:] = self._ancestors[np.ix_(nodes, columns)]
            keys = np.concatenate([np.arange(committed), len(self.prefix) - self.shared + columns])
            for group, seen in _groups(visible, limit):
                yield self._block(nodes[group], keys[seen], visible[np.ix_(group, seen)])

    def _block(self, nodes: np.ndarray, seen: np.ndarray, visible: np.ndarray) -> OpenBlock:
        count = len(nodes) * self.heads
        keys = np.full(len(seen) + -len(seen) % CHUNK, len(self.open_slots))
        keys[: len(seen)] = seen
        hidden = np.ones((count + -count % gemm.ROWS, len(keys)), bool)
        hidden[:count, : len(seen)] = ~visible.repeat(self.heads, axis=0)
        hidden[count:] = False  # rows of padding are finite, and dropped
        rows = None
        if len(nodes) < self.nodes:
            own = (nodes[:, None] * self.heads + np.arange(self.heads)).reshape(-1)
            rows = torch.from_numpy(np.concatenate([own, own[:1].repeat(len(hidden) - count)]))
            hidden[count:] = hidden[0]
        return OpenBlock(torch.from_numpy(keys), torch.from_numpy(hidden), rows)


def _groups(visible: np.ndarray, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Consecutive nodes that together see at most `limit` columns (always at least one node), with those columns."""
    first, union = 0, visible[0]
    for node in range(1, len(visible)):
        wider = union | visible[node]
        if np.count_nonzero(wider) > limit:
            yield np.arange(first, node), np.flatnonzero(union)
            first, wider = node, visible[node]
        union = wider
    yield np.arange(first, len(visible)), np.flatnonzero(union)


@torch.no_grad()
def verify(q: Tensor, kv_pool: Tensor, plan: RequestPlan, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, heads, row_dim]; kv_pool [slots, row_dim]. Returns float32 out [n, heads, rank] and natural-log lse
    [n, heads]."""
    rows = gemm.pad_rows((q.float() * scale).reshape(plan.nodes * plan.heads, -1))
    sums, maximum = torch.zeros(len(rows), rank + ONES), torch.full((len(rows), 1), -torch.inf)

    # A row that a node must not see may hold anything, NaN too; weight 0 would not silence it. Then, and where products
    # would not add their rows one by one, a block is only as wide as what a few nodes see.
    # (A sum that overflows says so too soon, which costs time only.)
    open_keys = F.pad(_gather(kv_pool, plan.open_slots, rank), (0, 0, 0, 1))
    blocks = plan.open_blocks(gemm.chain_rows(rank + ONES) if math.isfinite(open_keys.sum().item()) else 0)
    open_kv = [open_keys.index_select(0, block.keys) for block in blocks]
    open_scores = [_open_scores(rows, kv, block, maximum) for kv, block in zip(open_kv, blocks, strict=True)]

    step = max(gemm.ROWS, SCORES // max(plan.shared, 1) // gemm.ROWS * gemm.ROWS)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        _read_shared(rows[part], kv_pool, plan, rank, maximum[part], sums[part])

    for block, kv, scores in zip(blocks, open_kv, open_scores, strict=True):
        values = _values(kv, rank)
        if block.rows is None:
            gemm.add_matmul(sums, scores.sub_(maximum).exp_(), values)
        else:
            some = sums[block.rows]
            gemm.add_matmul(some, scores.sub_(maximum[block.rows]).exp_(), values)
            sums[block.rows] = some

    count = plan.nodes * plan.heads
    total = sums[:count, rank : rank + 1]
    out, lse = sums[:count, :rank] / total, maximum[:count] + total.log()
    return out.view(plan.nodes, plan.heads, rank), lse.view(plan.nodes, plan.heads)


def _open_scores(rows: Tensor, kv: Tensor, block: OpenBlock, maximum: Tensor) -> Tensor:
    """Masked scores of a block's rows; raises their maximum in place."""
    own = rows if block.rows is None else rows[block.rows]
    scores = gemm.scores(own, kv[:, : rows.shape[1]]).masked_fill_(block.hidden, -torch.inf)
    top = scores.amax(dim=1, keepdim=True)
    if block.rows is None:
        torch.maximum(maximum, top, out=maximum)
    else:
        maximum[block.rows] = torch.maximum(maximum[block.rows], top)
    return scores


def _read_shared(rows: Tensor, kv_pool: Tensor, plan: RequestPlan, rank: int, maximum: Tensor, sums: Tensor) -> None:
    """The chunks that every node sees whole. All scores come first: weights are relative to the maximum over all keys.
    Raises `maximum` and adds P @ [V, 1] to `sums`, in place."""
    if not plan.shared:
        return
    groups = plan.prefix[: plan.shared].split(GROUP)
    kept: list[Tensor] = []
    scores = torch.empty(len(rows), plan.shared)
    for part, slots in zip(scores.split(GROUP, dim=1), groups, strict=True):
        kv = _gather(kv_pool, slots, rank)
        part.copy_(gemm.scores(rows, kv[:, : rows.shape[1]]))
        if plan.shared <= KEPT:
            kept.append(kv)
    torch.maximum(maximum, scores.amax(dim=1, keepdim=True), out=maximum)
    weights = scores.sub_(maximum).exp_()
    for index, part in enumerate(weights.split(GROUP, dim=1)):
        kv = kept[index] if kept else _gather(kv_pool, groups[index], rank)
        for chunk, values in zip(part.split(CHUNK, dim=1), _values(kv, rank).split(CHUNK), strict=True):
            gemm.add_matmul(sums, chunk, values)


def _gather(kv_pool: Tensor, slots: Tensor, rank: int) -> Tensor:
    """Rows of the pool as float32; the columns after the rank hold ONES at least."""
    kv = kv_pool.index_select(0, slots).float()
    missing = rank + ONES - kv.shape[1]
    return F.pad(kv, (0, missing)) if missing > 0 else kv


def _values(kv: Tensor, rank: int) -> Tensor:
    """[V, 1], in the place of a gathered K that is no longer needed."""
    kv[:, rank : rank + ONES] = 1.0
    return kv[:, : rank + ONES]
