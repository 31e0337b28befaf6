"""The two changes of every decode step, draft and commit, by the host library. Their twins, and all other changes, are
in table.py: what is refused here changes nothing, and the twin says why."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from tpverify import native
from tpverify.config import MAX_NODES
from tpverify.kv.digest import SlotHash
from tpverify.kv.slots import Slots, SlotStates


class NativeTables:
    """Of one pool. The arrays stay where they are, and a change's are copied to such: the library has their addresses,
    and to ask numpy for one takes longer than to copy a tree."""

    def __init__(self, library: ctypes.CDLL, slots: SlotStates, keys: SlotHash) -> None:
        self._library, self._slots = library, slots
        self._params = params = native.TablesParams(ctypes.sizeof(native.TablesParams), slots.states.size)
        params.states, params.readers = slots.states.ctypes.data, slots.readers.ctypes.data
        params.positions, params.owners = slots.positions.ctypes.data, slots.owners.ctypes.data
        params.generations = slots.generations.ctypes.data
        params.slot_keys, params.position_keys = (array.ctypes.data for array in keys.keys)
        self._reference, self._keys = ctypes.byref(params), keys
        own = self._tree, self._path, self._settled = np.empty((3, MAX_NODES), np.int32)
        params.tree, params.path, params.settled = (array.ctypes.data for array in own)

    def draft(self, seq: int, length: int, prefix_sum: int, tree: Slots) -> tuple[int, int] | None:
        """Free slots become the tree of a sequence that has none: its sum of the digest's terms, and the sequence's
        hash; or None."""
        if not _fits(tree):
            return None
        params, self._tree[: tree.size] = self._params, tree
        params.limit, params.seq, params.length, params.prefix_sum = self._slots.limit, seq, length, prefix_sum
        params.nodes = tree.size
        if self._library.tpv_draft(self._reference):
            return None
        return params.tree_sum, params.hash

    def commit(
        self, seq: int, length: int, prefix_sum: int, tree: Slots, path: npt.NDArray[np.int32]
    ) -> tuple[Slots, Slots, int, int] | None:
        """The tree's nodes on `path` become the next positions: slots accepted, slots freed, the prefix's sum, and the
        sequence's hash; or None."""
        if not (_fits(tree) and _fits(path)):
            return None
        params, self._tree[: tree.size], self._path[: path.size] = self._params, tree, path
        params.generation = self._slots.generation + 1
        params.seq, params.length, params.prefix_sum = seq, length, prefix_sum
        params.nodes, params.accepted = tree.size, path.size
        if self._library.tpv_commit(self._reference):
            return None
        self._slots.generation += 1
        settled = self._settled[: tree.size].copy()
        return settled[: path.size], settled[path.size :], params.prefix_sum, params.hash


def _fits(array: npt.NDArray[Any]) -> bool:
    return array.dtype.char == "i" and array.size <= MAX_NODES
