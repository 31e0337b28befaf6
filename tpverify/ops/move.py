"""Rows of the pool that change slots, in all layers at once, and the hash that says what was moved."""

import numpy as np
import torch
from torch import Tensor

from tpverify.config import check_type
from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.tree.arrays import as_numpy


def move_rows(
    pool: Tensor, src: np.ndarray | Tensor, dst: np.ndarray | Tensor, *, hashed: bool = False
) -> Tensor | None:
    """Row src[i] of every layer goes to row dst[i], for all i at once.

    pool [layers, slots, row] of any dtype, on the CPU or a GPU, with dense rows of a multiple of 16 bytes; src, dst
    int32 or int64 [count]. No dst may be a src or another dst: old and new rows are then both valid.
    Returns None, or with `hashed` row_hashes of the rows moved: int64 [layers, count], holding the 64 bits, on the
    pool's device. Raises ArgumentError, and moves nothing, for anything else. On a GPU it is one launch on the current
    stream; slots are checked on the CPU, where they had better be.
    """
    _check_pool(pool)
    sources, targets = _check_slots("src", src, pool.shape[1]), _check_slots("dst", dst, pool.shape[1])
    if len(targets) != len(sources):
        raise ArgumentError("dst", f"{len(sources)} slots, one for each of src", len(targets))
    if len(np.unique(targets)) < len(targets):
        raise ArgumentError("dst", "different slots", "one twice")
    if len(both := np.intersect1d(sources, targets)):
        raise ArgumentError("dst", "no slot of src", int(both[0]))
    if pool.device.type == "cuda":
        return _move_on_gpu(pool, torch.from_numpy(np.stack([sources, targets]).astype(np.int32)), hashed)
    rows = pool.index_select(1, torch.from_numpy(sources))
    pool.index_copy_(1, torch.from_numpy(targets), rows)
    return torch.from_numpy(row_hashes(rows.view(torch.uint8).numpy()).view(np.int64)) if hashed else None


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """uint64 [...]: hashes of rows uint8 [..., bytes], bytes a multiple of 8, as csrc/tpverify.h defines them.

    Word i of a row seeds SplitMix64 (Steele, Lea, Flood 2014), whose i-th output is added up: the hash depends on a
    row's bytes and their order, and on nothing else.
    """
    words = np.ascontiguousarray(rows).view("<u8")
    z = words + np.arange(1, words.shape[-1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).sum(axis=-1, dtype=np.uint64)


def _move_on_gpu(pool: Tensor, moves: Tensor, hashed: bool) -> Tensor | None:
    """moves int32 [2, count] on the CPU."""
    layers, count = pool.shape[0], moves.shape[1]
    hashes = torch.empty(layers, count, dtype=torch.int64, device=pool.device) if hashed else None
    if layers and count:
        src, dst = moves.to(pool.device)
        cuda.move_rows(pool, src, dst, hashes)
    return hashes


def _check_pool(pool: Tensor) -> None:
    check_type("pool", pool, Tensor, "a torch tensor [layers, slots, row]")
    if pool.dim() != 3:
        raise ArgumentError("pool", "[layers, slots, row]", tuple(pool.shape))
    if not pool.shape[2] or pool.shape[2] * pool.itemsize % 16:
        raise ArgumentError("pool", "rows of a multiple of 16 bytes", f"{pool.shape[2]} x {pool.itemsize}")
    if pool.stride(2) != 1 or pool.stride(1) < pool.shape[2]:
        raise ArgumentError("pool", "dense rows that do not overlap", f"strides {pool.stride()}")
    reason = cuda.why_not(pool.device) if pool.device.type == "cuda" else None
    if reason or pool.device.type not in ("cpu", "cuda"):
        raise ArgumentError("pool", "memory of the CPU, or of a GPU with kernels for it", reason or pool.device)


def _check_slots(name: str, slots: np.ndarray | Tensor, pool_slots: int) -> np.ndarray:
    """int64, on the CPU."""
    array = slots.cpu().numpy() if isinstance(slots, Tensor) else as_numpy(name, slots)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise ArgumentError(name, "int32 or int64 [count]", f"{array.dtype} {array.shape}")
    if len(array) and not 0 <= array.min() <= array.max() < pool_slots:
        raise ArgumentError(name, f"slots from 0 to {pool_slots - 1}", f"{array.min()} to {array.max()}")
    return array.astype(np.int64)
