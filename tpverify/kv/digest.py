"""Digests of 64 bits: structural, of where every position of every sequence lies, and of content, of what lies there.

Structural: a sequence's prefix is the inner product, mod 2^64, of pseudo-random keys of its slots and of its positions
(multilinear hashing). It is a sum, so an append adds only its own terms, a move replaces those of the rows moved, and a
fork or a close costs O(1). Sequences are mixed one by one and summed, so the order in which they changed does not
matter. What the cache keeps and what is quarantined are two more such sums.

Content: hashes of rows, added up over layers with a key each, then over logical positions with a key each. A move
leaves it as it was. Hashes of single positions say where two replicas differ.
"""

from collections import Counter
from collections.abc import Sequence as Listlike

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

    @property
    def keys(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        return self._slot_keys, self._position_keys

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


def position_hashes(row_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """uint64 [n]: what is kept at each of n positions, from hashes of the rows [tables, n], the layers' among them.

    A sum of products with odd keys, so that a single row that differs always shows, and layers that changed places do.
    """
    return _odd_keys(3, len(row_hashes)) @ row_hashes


def content_digest(hashes: npt.NDArray[np.uint64]) -> str:
    """16 hex digits of position_hashes [n], the position being the index: they are the same wherever the rows lie."""
    return f"{mix64(int(_odd_keys(4, hashes.size) @ hashes) ^ mix64(hashes.size)):016x}"


def outlier(words: Listlike[object]) -> tuple[int, list[int], bool]:
    """Of ranks whose words should be equal and are not: the rank to blame, those that contradict it, and whether it is
    known to be wrong. It is when most ranks agree on another word; else the last rank is named, and may be right."""
    common, votes = Counter(words).most_common(1)[0]
    known = 2 * votes > len(words)
    blamed = next(rank for rank, word in enumerate(words) if word != common) if known else len(words) - 1
    return blamed, [rank for rank, word in enumerate(words) if word != words[blamed]], known


def _odd_keys(stream: int, n: int) -> npt.NDArray[np.uint64]:
    return np.random.PCG64(stream).random_raw(n) | np.uint64(1)
