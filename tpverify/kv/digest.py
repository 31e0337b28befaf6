"""Structural digest: 64 bits that differ when two replicas map any position of any sequence differently.

A sequence's prefix is the inner product, mod 2^64, of pseudo-random keys of its slots and of its positions
(multilinear hashing). It is a sum, so an append adds only its own terms, a move replaces those of the rows moved, and a
fork or a close costs O(1). Sequences are mixed one by one and summed, so the order in which they changed does not
matter. What the cache keeps and what is quarantined are two more such sums.
"""

import numpy as np
import numpy.typing as npt

from tpverify.kv.slots import Slots

MASK64 = 2**64 - 1


def mix64(x: int) -> int:
    """A bijection of 64-bit words whose outputs look independent (SplitMix64; Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


class SlotHash:
    """Pseudo-random keys of slots and of positions, uint64 [num_slots] each, the same in every process."""

    def __init__(self, num_slots: int) -> None:
        # Two streams: with one, slot b at position a would hash as slot a at position b.
        self._slot_keys = np.random.PCG64(1).random_raw(num_slots)
        self._position_keys = np.random.PCG64(2).random_raw(num_slots)

    def __call__(self, slots: Slots, position: int) -> int:
        """The terms of slots int32 [n] at positions position .. position + n - 1; add them up mod 2^64."""
        return int(self._slot_keys.take(slots).dot(self._position_keys[position : position + slots.size]))

    def terms(self, slots: Slots, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """The term of each slots[i] at positions[i]."""
        return self._slot_keys.take(slots) * self._position_keys.take(positions)

    def at(self, slots: Slots, positions: npt.NDArray[np.int32]) -> int:
        """Their sum mod 2^64."""
        return int(self._slot_keys.take(slots).dot(self._position_keys.take(positions)))


def sequence_hash(seq: int, length: int, prefix_sum: int, tree_size: int, tree_sum: int) -> int:
    """One 64-bit word for all that a sequence maps: its prefix and its uncommitted tree."""
    word = mix64((mix64(seq) + prefix_sum) & MASK64)
    word = mix64((word + tree_sum) & MASK64)
    return mix64(word ^ length ^ tree_size << 32)


def pool_hash(cached_sum: int, quarantined_sum: int, limit: int) -> int:
    """One 64-bit word for what no sequence maps: the cache, the quarantine and the limit."""
    word = mix64((limit + cached_sum) & MASK64)
    return mix64((word + quarantined_sum) & MASK64)
