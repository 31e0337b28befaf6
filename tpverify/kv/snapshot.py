"""The tables at one position of the log, for a rank that joins there: it has none of the entries before."""

import msgspec
import numpy as np

from tpverify.kv.entries import int32
from tpverify.kv.extents import WIRE_INT32, pack, unpack
from tpverify.kv.slots import LIVE, QUARANTINED, SCRATCH, Slots, SlotStates
from tpverify.kv.table import SequenceTables


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """After entry `number`. sequences: (number, runs of prefix slots, int32 tree slots). cached: runs of (slot,
    position). quarantined: runs of slots."""

    number: int
    sequences: list[tuple[int, bytes, bytes]]
    cached: bytes
    quarantined: bytes
    limit: int

    @classmethod
    def of(cls, tables: SequenceTables, number: int) -> "Snapshot":
        slots = tables.slots
        cached = np.flatnonzero(slots.cached).astype(np.int32)
        quarantined = np.flatnonzero(slots.states == QUARANTINED).astype(np.int32)
        sequences = [(seq, pack(s.prefix), int32(s.tree)) for seq, s in tables.items()]
        return cls(number, sequences, pack(cached, slots.positions.take(cached)), pack(quarantined), slots.limit)

    def tables(self, num_slots: int) -> SequenceTables:
        """Raises ArgumentError if they do not fit a pool of num_slots slots."""
        tables = SequenceTables(num_slots)
        cached, positions = unpack("cached", self.cached, 2, num_slots)
        (quarantined,) = unpack("quarantined", self.quarantined, 1, num_slots)
        sequences = (
            (seq, unpack("prefix", prefix, 1, num_slots)[0], np.frombuffer(tree, WIRE_INT32))
            for seq, prefix, tree in self.sequences
        )
        tables.restore(sequences, cached, positions, quarantined, self.limit)
        return tables


def held(slots: SlotStates) -> Slots:
    """Slots whose rows somebody may still read, int32 [n]: committed ones in runs of consecutive positions, of which
    there are about as many as texts, then those of trees."""
    live, trees = (np.flatnonzero(slots.states == state).astype(np.int32) for state in (LIVE, SCRATCH))
    live = live[np.argsort(slots.positions.take(live), kind="stable")]
    positions = slots.positions.take(live)
    nth = np.arange(live.size) - np.searchsorted(positions, positions)  # of those at the same position
    return np.concatenate([live[np.lexsort((positions, nth))], trees])
