"""Matrix products whose rows do not know their neighbours.

Losslessness bit for bit needs a product in which the bits of row i depend on row i alone: not on how many rows came
with it, nor on where in the block it sat. Fixed blocks of ROWS rows give that. Most BLAS libraries give it for any
multiple of ROWS as well, several times faster, so each shape is probed once per process and takes the fast way only
where the probe holds.
"""

import functools

import torch
from torch import Tensor

ROWS = 4  # rows of the smallest product; one row alone would be dispatched to a matrix-vector kernel with another order
SLAB = 128  # rows of the largest product: every multiple of ROWS up to here is probed
CHUNK = 64  # columns of a score product, and rows of V in a canonical chunk


def pad_rows(x: Tensor) -> Tensor:
    """[M, ...] -> [M', ...] contiguous with M' the next multiple of ROWS, new rows zero."""
    missing = -x.shape[0] % ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] with M a multiple of ROWS: float32 [M, N], each row a function of that row of `a` and of `b`
    alone."""
    step = _step(a, b)
    if a.shape[0] <= step:
        return torch.mm(a, b)
    return torch.cat([torch.mm(block, b) for block in a.split(step)])


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] += a [M, K] @ b [K, N] in place, as `matmul` does it."""
    step = _step(a, b)
    if a.shape[0] <= step:
        out.addmm_(a, b)
        return
    for part, block in zip(out.split(step), a.split(step), strict=True):
        part.addmm_(block, b)


def _step(a: Tensor, b: Tensor) -> int:
    """Rows that one product may take."""
    return SLAB if rows_independent(a.shape[1], b.shape[1], b.stride(1) == 1) else ROWS


def matmul_heads(a: Tensor, b: Tensor) -> Tensor:
    """a [H, M, K] @ b [H, K, N] with M a multiple of ROWS: float32 [H, M, N], each head the bits of `matmul`."""
    heads, m, k = a.shape
    if m <= SLAB and heads_independent(heads, k, b.shape[2]):
        return torch.bmm(a, b)
    return torch.stack([matmul(rows.contiguous(), weight) for rows, weight in zip(a, b, strict=True)])


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q [M, K] @ k [C, K].T with M a multiple of ROWS and C of CHUNK: a score depends on its row of q and of k
    alone."""
    width = score_columns(q.shape[1])
    if len(k) <= width:
        return matmul(q, k.t())
    return torch.cat([matmul(q, block.t()) for block in k.split(width)], dim=1)


@functools.cache
def rows_independent(k: int, n: int, row_major: bool) -> bool:
    """Does one product over M rows give the bits of M / ROWS products, for every M up to SLAB? For b [k, n] in the
    given memory order, `a` contiguous or a slice of wider rows, and for products added to what is there."""
    generator = torch.Generator().manual_seed(k * 31 + n)
    wide = torch.randn(SLAB, 2 * k, generator=generator)
    a = wide[:, :k].contiguous()
    b = torch.randn(k, n, generator=generator) if row_major else torch.randn(n, k, generator=generator).t()
    c = torch.randn(SLAB, n, generator=generator)
    shuffle = torch.randperm(SLAB, generator=generator)
    counts = range(ROWS, SLAB + 1, ROWS)

    blocks = torch.cat([torch.mm(block, b) for block in a.split(ROWS)])
    sums = torch.cat([torch.addmm(there, block, b) for there, block in zip(c.split(ROWS), a.split(ROWS), strict=True)])
    return (
        all(torch.equal(torch.mm(a[:m], b), blocks[:m]) for m in counts)
        and all(torch.equal(torch.addmm(c[:m], a[:m], b), sums[:m]) for m in counts)
        and torch.equal(torch.mm(a[shuffle], b), blocks[shuffle])
        and torch.equal(torch.addmm(c, wide[:, :k], b), sums)
        and torch.equal(torch.mm(wide[:, :k], b), blocks)
    )


@functools.cache
def heads_independent(heads: int, k: int, n: int) -> bool:
    """Does one batched product give the bits of a product for each head, for every M up to SLAB? For rows that are
    shared by all heads, that lie head by head or row by row, or that are a slice of wider rows."""
    if not rows_independent(k, n, True):
        return False
    generator = torch.Generator().manual_seed(heads * 31 + k)
    wide = torch.randn(SLAB, heads, 2 * k, generator=generator)
    b = torch.randn(heads, k, n, generator=generator)
    by_row = wide[:, :, :k].contiguous().transpose(0, 1)
    views = (wide[:, :, :k].transpose(0, 1), by_row, by_row.contiguous(), by_row[:1].expand(heads, -1, -1))
    wanted = [torch.stack([torch.mm(rows.contiguous(), w) for rows, w in zip(a, b, strict=True)]) for a in views]
    return all(
        torch.equal(torch.bmm(a[:, :m], b), each[:, :m])
        for a, each in zip(views, wanted, strict=True)
        for m in range(ROWS, SLAB + 1, ROWS)
    )


@functools.cache
def score_columns(k: int) -> int:
    """How many keys (a multiple of CHUNK) one score product may take and still give each score the bits of a CHUNK
    alone."""
    generator = torch.Generator().manual_seed(k)
    keys = torch.randn(4 * CHUNK, k, generator=generator)
    for m in (ROWS, 5 * ROWS, SLAB):
        q = torch.randn(m, k, generator=generator)
        blocks = torch.cat([matmul(q, block.t()) for block in keys.split(CHUNK)], dim=1)
        if not all(torch.equal(matmul(q, keys[:c].t()), blocks[:, :c]) for c in range(CHUNK, 4 * CHUNK + 1, CHUNK)):
            return CHUNK
    return 4 * CHUNK


@functools.cache
def chain_rows(n: int) -> int:
    """How many rows of V (a multiple of CHUNK) one product may span and still add them strictly one after another.

    Where it does, rows of weight zero can sit between the rows a node sees without changing a bit of its sum, so nodes
    that see different rows share one product. CHUNK means that only one node's rows at a time are safe.
    """
    generator = torch.Generator().manual_seed(n)
    safe = CHUNK
    for width in (2 * CHUNK, 3 * CHUNK):
        for m in (ROWS, 5 * ROWS, SLAB):
            weight = torch.rand(m, CHUNK, generator=generator)
            value = torch.randn(CHUNK, n, generator=generator)
            seen = torch.sort(torch.randperm(width, generator=generator)[:CHUNK]).values
            spread_weight = torch.zeros(m, width).index_copy_(1, seen, weight)
            spread_value = torch.randn(width, n, generator=generator).index_copy_(0, seen, value)
            sums = torch.randn(m, n, generator=generator)
            spread_sums = sums.clone()
            add_matmul(sums, weight, value)
            add_matmul(spread_sums, spread_weight, spread_value)
            if not torch.equal(spread_sums, sums):
                return safe
        safe = width
    return safe


def describe(kv_lora_rank: int = 512, row_dim: int = 576) -> dict[str, int | bool]:
    """What the probes say of this process's BLAS, for the score and the value product of an MLA row.

    rows_independent: products of more than ROWS rows keep each row's bits. The others: how many rows, keys and rows of
    V one product may take.
    """
    columns = kv_lora_rank + 16  # the reference's ones beside V
    independent = rows_independent(row_dim, CHUNK, False) and rows_independent(CHUNK, columns, True)
    return {
        "rows_independent": independent,
        "product_rows": SLAB if independent else ROWS,
        "score_columns": score_columns(row_dim),
        "chain_rows": chain_rows(columns),
    }
