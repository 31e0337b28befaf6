"""The entries of the log: each is one change of the tables, small on the wire, checked wherever it is applied."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tpverify.errors import ArgumentError
from tpverify.kv.extents import WIRE_INT32, unpack
from tpverify.kv.slots import Slots
from tpverify.kv.table import SequenceTables


class _Change(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One entry. `apply` runs it on tables and returns the slots that became free; ArgumentError if it does not fit.

    Slots travel as int32 little-endian, or as the runs of `extents.pack`.
    """

    def apply(self, tables: SequenceTables) -> Slots:
        raise NotImplementedError


class Open(_Change, frozen=True):
    """A sequence, empty or with the cached slots of its first positions: runs of slots, in position order."""

    seq: int
    prefix: bytes = b""

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.open(self.seq, *unpack("prefix", self.prefix, 1, tables.num_slots))


class Append(_Change, frozen=True):
    """Further committed positions at `slots`, ascending int32 little-endian."""

    seq: int
    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.append(self.seq, _int32("slots", self.slots))


class Draft(_Change, frozen=True):
    """Scratch slots of this step's tree, root first: ascending int32 little-endian."""

    seq: int
    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.draft(self.seq, _int32("slots", self.slots))


class Commit(_Change, frozen=True):
    """Accepted nodes of the tree: ascending int32 little-endian indices, the root (0) first."""

    seq: int
    path: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.commit(self.seq, _int32("path", self.path))


class Fork(_Change, frozen=True):
    """A sequence `new` with the committed positions of `seq`, in the same slots."""

    seq: int
    new: int

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.fork(self.seq, self.new)


class Close(_Change, frozen=True):
    """The end of a sequence."""

    seq: int

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.close(self.seq)


class Retain(_Change, frozen=True):
    """The prefix cache keeps these slots of committed positions: runs of slots."""

    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.retain(*unpack("slots", self.slots, 1, tables.num_slots))


class Evict(_Change, frozen=True):
    """The prefix cache lets these slots go: runs of slots."""

    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.evict(*unpack("slots", self.slots, 1, tables.num_slots))


class Move(_Change, frozen=True):
    """Rows change slots, in all layers: runs of (source, destination). Sources go into quarantine.

    A rank copies the rows, move by move, before it does the work of the step.
    """

    rows: bytes

    def pairs(self, num_slots: int) -> tuple[Slots, Slots]:
        """Sources and destinations, int32 [n]."""
        src, dst = unpack("rows", self.rows, 2, num_slots)
        return src, dst

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.move(*self.pairs(tables.num_slots))


class Retire(_Change, frozen=True):
    """These sources of moves leave quarantine: runs of slots."""

    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.retire(*unpack("slots", self.slots, 1, tables.num_slots))


class Resize(_Change, frozen=True):
    """Slots from num_slots on, slot 0 counted, are not handed out from now on."""

    num_slots: int

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.resize(self.num_slots)


Entry = Open | Append | Draft | Commit | Fork | Close | Retain | Evict | Move | Retire | Resize


def int32(values: npt.NDArray[Any]) -> bytes:
    return values.astype(WIRE_INT32, copy=False).tobytes()


def _int32(argument: str, raw: bytes) -> npt.NDArray[Any]:
    if len(raw) % WIRE_INT32.itemsize:
        raise ArgumentError(argument, "bytes of int32", f"{len(raw)} bytes")
    return np.frombuffer(raw, WIRE_INT32)
