"""The two changes of every decode step, draft and commit, by the host library. Their twins, and all other changes, are
in table.py: what is refused here changes nothing, and the twin says why."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from tpverify import native
from tpverify.kv.digest import SlotHash
from tpverify.kv.slots import Slots, SlotStates


class NativeTables:
    """Of one pool. The arrays stay where they are: the library has their addresses."""

    def __init__(self, library: ctypes.CDLL, slots: SlotStates, keys: SlotHash) -> None:
        self._library, self._slots = library, slots
        self._params = params = native.TablesParams(ctypes.sizeof(native.TablesParams), slots.states.size)
        params.states, params.readers = slots.states.ctypes.data, slots.readers.ctypes.data
        params.positions, params.owners = slots.positions.ctypes.data, slots.owners.ctypes.data
        params.generations = slots.generations.ctypes.data
        params.slot_keys, params.position_keys = (array.ctypes.data for array in keys.keys)
        self._reference, self._keys = ctypes.byref(params), keys

    def draft(self, seq: int, length: int, prefix_sum: int, tree: Slots) -> tuple[int, int] | None:
        """Free slots become the tree of a sequence that has none: its sum of the digest's terms, and the sequence's
        hash; or None."""
        if not _plain(tree):
            return None
        params = self._params
        params.limit, params.seq, params.length, params.prefix_sum = self._slots.limit, seq, length, prefix_sum
        params.tree, params.nodes = _address(tree), tree.size
        if self._library.tpv_draft(self._reference):
            return None
        return params.tree_sum, params.hash

    def commit(
        self, seq: int, length: int, prefix_sum: int, tree: Slots, path: npt.NDArray[np.int32]
    ) -> tuple[Slots, Slots, int, int] | None:
        """The tree's nodes on `path` become the next positions: slots accepted, slots freed, the prefix's sum, and the
        sequence's hash; or None."""
        if not (_plain(tree) and _plain(path)):
            return None
        params, settled = self._params, np.empty(tree.size, np.int32)
        params.generation = self._slots.generation + 1
        params.seq, params.length, params.prefix_sum = seq, length, prefix_sum
        params.tree, params.nodes, params.path, params.accepted = _address(tree), tree.size, _address(path), path.size
        params.settled = _address(settled)
        if self._library.tpv_commit(self._reference):
            return None
        self._slots.generation += 1
        return settled[: path.size], settled[path.size :], params.prefix_sum, params.hash


def _plain(array: npt.NDArray[Any]) -> bool:
    return array.dtype.char == "i" and array.flags.c_contiguous


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # half of what array.ctypes takes
    return address
