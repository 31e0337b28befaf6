"""Extents: maximal runs of slots that ascend by one. A reversed pair is two extents (vllm-ascend#14040).

They count how scattered a sequence is, and they are how slots travel: a run costs the same whatever its length.
"""

from collections.abc import Sequence as Listlike
from typing import Any

import numpy as np
import numpy.typing as npt

from tpverify.errors import ArgumentError
from tpverify.kv.slots import Slots

WIRE_INT32 = np.dtype("<i4")


def count(slots: Slots) -> int:
    """Extents of slots int32 [n] in the order given."""
    return int(slots.size > 0) + int(np.count_nonzero(np.diff(slots) != 1))


def counts(tables: Listlike[Slots]) -> list[int]:
    """Extents of each table."""
    filled = [slots for slots in tables if slots.size]
    if not filled:
        return [0] * len(tables)
    starts = np.cumsum([0, *(slots.size for slots in filled[:-1])])
    mask = begins(np.concatenate(filled))
    mask[starts] = True
    found = iter(np.add.reduceat(mask, starts, dtype=np.intp).tolist())
    return [next(found) if slots.size else 0 for slots in tables]


def begins(*columns: Slots) -> npt.NDArray[np.bool_]:
    """Where a run begins, bool [n]: there, some column does not go on by one."""
    breaks = np.zeros(columns[0].size, np.bool_)
    breaks[:1] = True
    for column in columns:
        breaks[1:] |= np.diff(column) != 1
    return breaks


def pack(*columns: Slots) -> bytes:
    """Columns of equal length as runs in which all go on by one: int32 (a first value a column, count), on the wire."""
    first = np.flatnonzero(begins(*columns))
    counts = np.diff(first, append=columns[0].size)
    return np.stack([*(column[first] for column in columns), counts], axis=1).astype(WIRE_INT32).tobytes()


def unpack(argument: str, raw: bytes, columns: int, most: int) -> list[Slots]:
    """The columns, int32 [n], that `pack` was given; ArgumentError for anything else or for n above `most`."""
    if len(raw) % (WIRE_INT32.itemsize * (columns + 1)):
        raise ArgumentError(argument, f"runs of {columns + 1} int32", f"{len(raw)} bytes")
    runs: npt.NDArray[Any] = np.frombuffer(raw, WIRE_INT32).reshape(-1, columns + 1).astype(np.int64)
    counts = runs[:, -1]
    if counts.size and (counts.min() < 1 or counts.sum() > most):
        raise ArgumentError(argument, f"runs of at least 1 and at most {most} slots in all", counts)
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if counts.size else 0)
    return [(np.repeat(runs[:, i] - ends + counts, counts) + offsets).astype(np.int32) for i in range(columns)]
