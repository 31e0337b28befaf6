"""Matrix products whose rows do not know their neighbours.

Losslessness bit for bit needs a product in which the bits of row i depend on row i alone: not on how many rows came with it,
nor on where in the block it sat. Fixed blocks of ROWS rows give that. Most BLAS libraries give it for any multiple of ROWS
as well, several times faster, so each shape is probed once per process and takes the fast way only where the probe holds.
"""

import functools

import torch
from torch import Tensor

ROWS = 8  # rows of the smallest product; one row alone would be dispatched to a matrix-vector kernel with another order
SLAB = 128  # rows of the largest product: every multiple of ROWS up to here is probed
CHUNK = 64  # columns of a score product, and rows of V in a canonical chunk


def pad_rows(x: Tensor) -> Tensor:
    """[M, K] -> [M', K] contiguous with M' the next multiple of ROWS (at least ROWS), new rows zero."""
    missing = -x.shape[0] % ROWS if x.shape[0] else ROWS
    return torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x.contiguous()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] with M a multiple of ROWS: float32 [M, N], each row a function of that row of `a` and of `b` alone."""
    step = SLAB if _rows_independent(a.shape[1], b.shape[1], b.stride(1) == 1, b.stride(0)) else ROWS
    if a.shape[0] <= step:
        return torch.mm(a, b)
    return torch.cat([torch.mm(block, b) for block in a.split(step)])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [N, K].T with any M: float32 [M, N], rows independent of one another."""
    return matmul(pad_rows(x), weight.t())[: x.shape[0]]


@functools.cache
def _rows_independent(k: int, n: int, row_major: bool, stride: int) -> bool:
    """Does one product over M rows give the bits of M / ROWS products, for every M up to SLAB?"""
    generator = torch.Generator().manual_seed(k * 31 + n)
    a = torch.randn(SLAB, k, generator=generator)
    # The same memory layout as the caller's: BLAS picks its kernel by it.
    b = torch.randn(k, stride, generator=generator)[:, :n] if row_major else torch.randn(n, k, generator=generator).t()
    blocks = torch.cat([torch.mm(block, b) for block in a.split(ROWS)])
    shuffle = torch.randperm(SLAB, generator=generator)
    return all(torch.equal(torch.mm(a[:m], b), blocks[:m]) for m in range(ROWS, SLAB + 1, ROWS)) and torch.equal(
        torch.mm(a[shuffle], b), blocks[shuffle]
    )


@functools.cache
def chain_rows(n: int, stride: int) -> int:
    """How many rows of V (a multiple of CHUNK) one product may span and still add them strictly one after another.

    Where it does, rows of weight zero can sit between the rows a node sees without changing a bit of its sum, so nodes that
    see different rows share one product. CHUNK means that only one node's rows at a time are safe.
    """
    generator = torch.Generator().manual_seed(n)
    safe = CHUNK
    for width in (2 * CHUNK, 3 * CHUNK):
        for m in (ROWS, 5 * ROWS, SLAB):
            weight = torch.rand(m, CHUNK, generator=generator)
            value = torch.randn(CHUNK, stride, generator=generator)[:, :n]
            seen = torch.sort(torch.randperm(width, generator=generator)[:CHUNK]).values
            spread_weight = torch.zeros(m, width).index_copy_(1, seen, weight)
            spread_value = torch.randn(width, stride, generator=generator)[:, :n].index_copy_(0, seen, value)
            if not torch.equal(matmul(spread_weight, spread_value), matmul(weight, value)):
                return safe
        safe = width
    return safe
