"""Tree-masked MLA attention on the CPU, canonical: a row's bits are a function of its own token sequence alone.

A query at position p reads its keys in chunks at absolute multiples of 64 and merges the chunks in order by online
softmax. Within a chunk scores are independent dot products, and P @ V adds its rows one after another in position
order. Chunks that lie wholly in the committed prefix are the same rows for every node and take one product; in the
chunks from there on, each node sees its own ancestors. So a tree node gets the bits that the same token gets when it is
decoded alone, chunked prefill equals decoding, and neither heads, slots nor other requests matter.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.ops import gemm
from tpverify.ops.gemm import CHUNK

ONES = (
    16  # columns of ones beside V: P @ [V, 1] sums P in the same order as the output, and the same rescale serves both
)
GROUP = 4 * CHUNK  # prefix rows gathered at a time: they stay in the cache between Q @ K and P @ V


@dataclass(frozen=True)
class OpenBlock:
    """Some nodes' keys from one open chunk. slots int64 [C], in position order for every node.

    hidden: bool [R, C'] with R query rows, padded, and C rounded up to whole chunks. rows: which query rows, None for
    all.
    """

    slots: Tensor
    hidden: Tensor
    rows: Tensor | None


class RequestPlan:
    """One request, prepared once for all layers: prefix [S] and tree [n] int64 slots; words uint64 [n, ceil(n/64)]
    ancestor bits; depths int32 [n]; heads query rows a node."""

    def __init__(self, prefix: Tensor, tree: Tensor, words: np.ndarray, depths: np.ndarray, heads: int) -> None:
        self.prefix, self.tree, self.heads, self.nodes = prefix, tree, heads, len(depths)
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
            slots = torch.cat([self.prefix[len(self.prefix) - committed :], self.tree[torch.from_numpy(columns)]])
            for group, seen in _groups(visible, limit):
                yield self._block(nodes[group], slots[torch.from_numpy(seen)], visible[np.ix_(group, seen)])

    def _block(self, nodes: np.ndarray, slots: Tensor, visible: np.ndarray) -> OpenBlock:
        count = len(nodes) * self.heads
        hidden = np.ones((count + -count % gemm.ROWS, len(slots) + -len(slots) % CHUNK), bool)
        hidden[:count, : len(slots)] = ~visible.repeat(self.heads, axis=0)
        hidden[count:] = False  # rows of padding are finite, and dropped
        rows = None
        if len(nodes) < self.nodes:
            own = (nodes[:, None] * self.heads + np.arange(self.heads)).reshape(-1)
            rows = torch.from_numpy(np.concatenate([own, own[:1].repeat(len(hidden) - count)]))
            hidden[count:] = hidden[0]
        return OpenBlock(slots, torch.from_numpy(hidden), rows)


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


def verify(q: Tensor, kv_pool: Tensor, plan: RequestPlan, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, heads, row_dim]; kv_pool [slots, row_dim]. Returns float32 out [n, heads, rank] and natural-log lse [n,
    heads]."""
    count = plan.nodes * plan.heads
    rows = gemm.pad_rows((q.float() * scale).reshape(count, -1))
    maximum = torch.full((len(rows), 1), -torch.inf)
    sums = torch.zeros(len(rows), rank + ONES)
    for start in range(0, plan.shared, GROUP):
        kv = _gather(kv_pool, plan.prefix[start : min(start + GROUP, plan.shared)], rank)
        _merge(rows, kv, CHUNK, None, maximum, sums)

    # A row that a node must not see may hold anything, NaN too; weight 0 would not silence it. Then, and where the
    # products would not add their rows one by one, a block is only as wide as what a few nodes see.
    finite = torch.isfinite(kv_pool.index_select(0, plan.open_slots)).all()
    for block in plan.open_blocks(gemm.chain_rows(rank + ONES) if finite else 0):
        kv = _gather(kv_pool, block.slots, rank)
        if block.rows is None:
            _merge(rows, kv, len(kv), block.hidden, maximum, sums)
        else:
            some_maximum, some_sums = maximum[block.rows], sums[block.rows]
            _merge(rows[block.rows], kv, len(kv), block.hidden, some_maximum, some_sums)
            maximum[block.rows], sums[block.rows] = some_maximum, some_sums

    total = sums[:count, rank : rank + 1]
    out, lse = sums[:count, :rank] / total, maximum[:count] + total.log()
    return out.view(plan.nodes, plan.heads, rank), lse.view(plan.nodes, plan.heads)


def _gather(kv_pool: Tensor, slots: Tensor, rank: int) -> Tensor:
    """Rows of the pool as float32, zero rows up to a multiple of CHUNK; the columns after the rank hold ONES at
    least."""
    kv = kv_pool.index_select(0, slots).float()
    columns, rows = max(0, rank + ONES - kv.shape[1]), -len(slots) % CHUNK
    return F.pad(kv, (0, columns, 0, rows)) if rows or columns else kv


def _merge(q: Tensor, kv: Tensor, width: int, hidden: Tensor | None, maximum: Tensor, sums: Tensor) -> None:
    """Fold chunks of `width` rows of kv, one after the other, into (maximum, sums) in place. Overwrites kv's rope
    columns.

    maximum [R, 1]: running maximum of the scores. sums [R, rank + ONES]: P @ [V, 1] relative to it.
    """
    scores = gemm.scores(q, kv[:, : q.shape[1]])
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    chunks = scores.view(len(q), -1, width)
    running = torch.cat([maximum, chunks.amax(dim=2)], dim=1).cummax(dim=1).values
    weights = chunks.sub_(running[:, 1:, None]).exp_()
    decay = (running[:, :-1] - running[:, 1:]).exp_()
    columns = sums.shape[1]
    kv[:, columns - ONES : columns] = 1.0
    for index, values in enumerate(kv[:, :columns].split(width)):
        sums.mul_(decay[:, index : index + 1]).add_(gemm.matmul(weights[:, index], values))
    maximum.copy_(running[:, -1:])
