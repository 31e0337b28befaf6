"""Tree-masked MLA attention on the CPU, canonical: a row's bits are a function of its own token sequence alone.

A query at position p reads its keys in chunks at absolute multiples of 64 and merges the chunks in order by online softmax.
Within a chunk scores are independent dot products, and P @ V adds its rows one after another in position order. Chunks that
lie wholly in the committed prefix are the same rows for every node and take one product; in the chunks from there on, each
node sees its own ancestors. So a tree node gets the bits that the same token gets when it is decoded alone, chunked prefill
equals decoding, and neither heads, slots nor other requests matter.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tpverify.ops import gemm
from tpverify.ops.gemm import CHUNK

ONES = 16  # columns of ones beside V: P @ [V, 1] sums P in the same order as the output, and the same rescale serves both


class _Rows:
    """Online softmax over query rows (node-major, head-minor): running maximum, and P @ [V, 1] so far."""

    def __init__(self, q: Tensor, kv_lora_rank: int) -> None:
        self.q = gemm.pad_rows(q)
        self.rank = kv_lora_rank
        self.maximum = torch.full((len(self.q), 1), -torch.inf)
        self.sums = torch.zeros(len(self.q), kv_lora_rank + ONES)

    def read(self, kv: Tensor) -> None:
        """All rows see all of kv [CHUNK, row_dim]."""
        _merge(self.q, kv, self.rank, None, self.maximum, self.sums)

    def read_masked(self, rows: Tensor, kv: Tensor, visible: Tensor) -> None:
        """`rows` [R] see those of kv [C, row_dim] that visible [R, C] says; C is a multiple of CHUNK."""
        padding = -len(rows) % gemm.ROWS
        rows = torch.cat([rows, rows[:1].expand(padding)])  # a padded row repeats the first, visibly finite
        visible = torch.cat([visible, visible[:1].expand(padding, -1)])
        maximum, sums = self.maximum[rows], self.sums[rows]
        _merge(self.q[rows], kv, self.rank, visible, maximum, sums)
        self.maximum[rows], self.sums[rows] = maximum, sums

    def finish(self, count: int) -> tuple[Tensor, Tensor]:
        total = self.sums[:count, self.rank : self.rank + 1]
        return self.sums[:count, : self.rank] / total, (self.maximum[:count] + total.log()).squeeze(1)


def _merge(q: Tensor, kv: Tensor, rank: int, visible: Tensor | None, maximum: Tensor, sums: Tensor) -> None:
    """Fold one chunk into (maximum, sums) in place. Overwrites kv's rope columns."""
    # Scores chunk by chunk: a product's bits may depend on its width.
    scores = torch.cat([gemm.matmul(q, block.t()) for block in kv.split(CHUNK)], dim=1)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    new_maximum = torch.maximum(maximum, scores.amax(1, keepdim=True))
    weights = scores.sub_(new_maximum).exp_()
    kv[:, rank : rank + ONES] = 1.0
    sums.mul_(torch.exp(maximum - new_maximum)).add_(gemm.matmul(weights, kv[:, : rank + ONES]))
    maximum.copy_(new_maximum)


def _gather(kv_pool: Tensor, slots: Tensor, rank: int) -> Tensor:
    """Rows of the pool as float32, zero rows up to a multiple of CHUNK, at least ONES columns beyond the rank."""
    kv = kv_pool.index_select(0, slots).float()
    columns = max(0, rank + ONES - kv.shape[1])
    rows = -len(slots) % CHUNK
    return torch.nn.functional.pad(kv, (0, columns, 0, rows)) if rows or columns else kv


def verify(
    q: Tensor, kv_pool: Tensor, prefix: Tensor, tree: Tensor, words: np.ndarray, depths: np.ndarray, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One request. q [n, heads, row_dim]; kv_pool [slots, row_dim]; prefix [S], tree [n] int64 slots; words uint64
    [n, ceil(n/64)] ancestor bits; depths [n]. Returns out [n, heads, rank] and natural-log lse [n, heads], float32."""
    n, heads, _ = q.shape
    state = _Rows((q.float() * scale).reshape(n * heads, -1), rank)
    shared = len(prefix) // CHUNK * CHUNK
    for start in range(0, shared, CHUNK):
        state.read(_gather(kv_pool, prefix[start : start + CHUNK], rank))

    ancestors = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, count=n, bitorder="little").view(bool)
    positions = len(prefix) + depths.astype(np.int64)
    for start in range(shared, int(positions.max()) + 1, CHUNK):
        _read_open_chunk(state, kv_pool, prefix, tree, ancestors, positions, start, heads)
    out, lse = state.finish(n * heads)
    return out.view(n, heads, rank), lse.view(n, heads)


def _read_open_chunk(
    state: _Rows, kv_pool: Tensor, prefix: Tensor, tree: Tensor, ancestors: np.ndarray, positions: np.ndarray, start: int, heads: int
) -> None:
    """Positions start .. start + 63, where committed rows (if any are left) and each node's own ancestors meet."""
    committed = max(0, len(prefix) - start)
    columns = np.flatnonzero((positions >= start) & (positions < start + CHUNK))
    nodes = np.flatnonzero(positions >= start)
    kv = _gather(kv_pool, torch.cat([prefix[len(prefix) - committed :], tree[torch.from_numpy(columns)]]), state.rank)
    visible = np.zeros((len(nodes), len(kv)), bool)
    visible[:, :committed] = True
    visible[:, committed : committed + len(columns)] = ancestors[np.ix_(nodes, columns)]

    limit = gemm.chain_rows(state.rank + ONES, kv.shape[1])
    if len(kv) <= limit and torch.isfinite(kv).all():
        state.read_masked(_rows_of(nodes, heads), kv, _each_head(visible, heads))
        return
    # A row that a node must not see may hold anything, NaN too, and too many rows would not be added one by one: give
    # groups of nodes only the rows that one of them sees.
    for group, seen in _groups(visible, limit if torch.isfinite(kv).all() else 0):
        rows = torch.from_numpy(seen)
        block = torch.nn.functional.pad(kv[rows], (0, 0, 0, -len(seen) % CHUNK))
        mask = np.zeros((len(group), len(block)), bool)
        mask[:, : len(seen)] = visible[np.ix_(group, seen)]
        state.read_masked(_rows_of(nodes[group], heads), block, _each_head(mask, heads))


def _groups(visible: np.ndarray, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Consecutive nodes whose rows together stay within `limit` (always at least one node), with those rows in order."""
    first, union = 0, visible[0]
    for node in range(1, len(visible)):
        wider = union | visible[node]
        if wider.sum() > limit:
            yield np.arange(first, node), np.flatnonzero(union)
            first, wider = node, visible[node]
        union = wider
    yield np.arange(first, len(visible)), np.flatnonzero(union)


def _rows_of(nodes: np.ndarray, heads: int) -> Tensor:
    return torch.from_numpy((nodes[:, None] * heads + np.arange(heads)).reshape(-1))


def _each_head(visible: np.ndarray, heads: int) -> Tensor:
    return torch.from_numpy(visible).repeat_interleave(heads, dim=0)
