"""Who a node descends from: what a step's mask and positions are made of."""

import ctypes
from collections.abc import Sequence

import numpy as np

from tpverify import native
from tpverify.config import MAX_NODES
from tpverify.errors import ArgumentError


def ancestry(parents: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """Depths, and ancestor words uint64 [n, ceil(n / 64)], of a well-formed tree."""
    n = len(parents)
    depths, rows = [0] * n, [1] * n
    for i in range(1, n):
        parent = parents[i]
        depths[i] = depths[parent] + 1
        rows[i] = rows[parent] | 1 << i
    row_bytes = (n + 63) // 64 * 8
    words = np.frombuffer(b"".join(row.to_bytes(row_bytes, "little") for row in rows), np.uint64)
    return depths, words.reshape(n, -1)


def checked_ancestry(parents: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Depths int32 [n] and ancestor words of a tree that came as little-endian int32 parents [n], 1 to 1024 of them;
    both read-only. Raises ArgumentError for parents that are no tree's."""
    n, rest = divmod(len(parents), 4)
    if rest or not 1 <= n <= MAX_NODES:
        raise ArgumentError("parents", f"int32 of 1 to {MAX_NODES} nodes", f"{len(parents)} bytes")
    library = native.host()
    if library is None:
        above = np.frombuffer(parents, "<i4").tolist()
        for node, parent in enumerate(above):
            if not (0 <= parent < node if node else parent == -1):
                raise ArgumentError(f"parents[{node}]", "an earlier node, and -1 for the root", parent)
        levels, ancestor_words = ancestry(above)
        depths = np.array(levels, np.int32)
        depths.flags.writeable = False
        return depths, ancestor_words
    width = (n + 63) // 64
    raw = bytearray(8 * n * width + 4 * n)
    words = ctypes.addressof(ctypes.c_char.from_buffer(raw))  # in a tenth of the time that numpy takes to tell one
    size = ctypes.sizeof(native.AncestryParams)
    params = native.AncestryParams(size, n, 0, parents, words + 8 * n * width, words)
    native.check(library, library.tpv_ancestry(params))
    frozen = memoryview(raw).toreadonly()
    depths = np.frombuffer(frozen, np.int32, n, 8 * n * width)
    return depths, np.frombuffer(frozen, np.uint64, n * width).reshape(n, width)
