"""The numbered log of table changes: the coordinator writes it (KvLog), every rank replays it (Replica).

One writer and one order: a rank that misses an entry, or is given another in its place, is fenced and replaced.
"""

from collections.abc import Sequence as Listlike
from hashlib import blake2b
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from tpverify.config import MAX_NODES, check_int
from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.slots import FreeSlots, Slots
from tpverify.kv.table import SequenceTables

ANSWERS_KEPT = 4096  # entries whose repetition a replica still answers
WIRE_INT32 = np.dtype("<i4")


class _Change(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One entry. `apply` runs it on tables and returns the slots that became free; ArgumentError if it does not fit."""

    seq: int


class Open(_Change, frozen=True):
    """An empty sequence."""

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.open(self.seq)


class Append(_Change, frozen=True):
    """Further committed positions at `slots`, ascending int32 little-endian."""

    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.append(self.seq, _int32("slots", self.slots))


class Draft(_Change, frozen=True):
    """Scratch slots of this step's tree, root first: ascending int32 little-endian."""

    slots: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.draft(self.seq, _int32("slots", self.slots))


class Commit(_Change, frozen=True):
    """Accepted nodes of the tree: ascending int32 little-endian indices, the root (0) first."""

    path: bytes

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.commit(self.seq, _int32("path", self.path))


class Fork(_Change, frozen=True):
    """A sequence `new` with the committed positions of `seq`, in the same slots."""

    new: int

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.fork(self.seq, self.new)


class Close(_Change, frozen=True):
    """The end of a sequence."""

    def apply(self, tables: SequenceTables) -> Slots:
        return tables.close(self.seq)


Entry = Open | Append | Draft | Commit | Fork | Close


class Fenced(RuntimeError):
    """A replica saw a gap or a contradiction in its log. Its tables cannot be trusted: it must be replaced."""


class KvLog:
    """The coordinator's tables and allocator. A call validates fully before it changes anything, then records an entry.

    num_slots counts rows of the pool; slot 0, the padding sink, is never handed out. No sequence number is used twice.
    Errors: ArgumentError for a sequence that is not open or an argument out of range; PoolFull for too few free slots
    or max_sequences already open.
    """

    def __init__(self, num_slots: int, max_sequences: int = 4096) -> None:
        self._tables = SequenceTables(num_slots)
        self._free = FreeSlots(num_slots)
        self._max_sequences = check_int("max_sequences", max_sequences, 1, 2**31 - 1)
        self._next_seq = 0
        self._recorded = 0
        self._pending: list[Entry] = []

    def open(self) -> int:
        """Number of a new, empty sequence."""
        self._check_room()
        self._record(Open(self._new_seq()))
        return self._next_seq - 1

    def append(self, seq: int, n: int) -> Slots:
        """Slots, int32 [n], of n further committed positions. An uncommitted tree is dropped: its root moved."""
        n = check_int("n", n, 1, 2**31 - 1)
        self._make_room(seq, n)
        self._record(Append(seq, _wire(self._free.take_run(n))))
        return self.prefix_slots(seq)[-n:]

    def draft(self, seq: int, n: int) -> Slots:
        """Scratch slots, int32 [n], of a tree of n <= 1024 nodes, root included. An uncommitted tree is dropped."""
        n = check_int("n", n, 1, MAX_NODES)
        self._make_room(seq, n)
        self._record(Draft(seq, _wire(self._free.take_recent(n))))
        return self.tree_slots(seq)

    def commit(self, seq: int, path: npt.ArrayLike) -> None:
        """Commit the tree's nodes `path` (int, ascending, path[0] == 0) where they lie, and free the others' slots."""
        nodes = np.asarray(path)
        if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
            raise ArgumentError("path", "node indices, int [accepted]", path)
        wire = nodes.astype(WIRE_INT32)
        if wire.tolist() != nodes.tolist():
            raise ArgumentError("path", "node indices that fit int32", path)
        self._record(Commit(seq, wire.tobytes()))

    def fork(self, seq: int) -> int:
        """Number of a new sequence that reads the committed positions of `seq` in the same slots; a tree stays."""
        self._tables[seq]
        self._check_room()
        self._record(Fork(seq, self._new_seq()))
        return self._next_seq - 1

    def close(self, seq: int) -> None:
        """End a sequence; slots that no fork reads any longer become free."""
        self._record(Close(seq))

    def length(self, seq: int) -> int:
        """Committed positions."""
        return self._tables[seq].length

    def prefix_slots(self, seq: int) -> Slots:
        """Slots of the committed positions, int32 [length], a read-only view that later changes leave as it is."""
        return self._tables[seq].prefix

    def tree_slots(self, seq: int) -> Slots:
        """Slots of the uncommitted tree's nodes, int32 [n], read-only; empty when there is none."""
        return self._tables[seq].tree

    def pending(self) -> tuple[int, list[Entry]]:
        """Number (from 1) of the first entry that this call has not yet handed out, and all entries from there on."""
        entries, self._pending = self._pending, []
        return self._recorded - len(entries) + 1, entries

    def digest(self) -> str:
        """16 hex digits, equal to those of every replica that applied the same entries."""
        return self._tables.digest()

    def stats(self) -> dict[str, int]:
        """Slots free, scratch, live (in all num_slots - 1) and shared; sequences; entries recorded. O(num_slots)."""
        return self._tables.slots.counts() | {"sequences": len(self._tables), "entries": self._recorded}

    def _record(self, entry: Entry) -> None:
        self._free.give(entry.apply(self._tables))
        self._pending.append(entry)
        self._recorded += 1

    def _make_room(self, seq: int, n: int) -> None:
        """Drop the sequence's tree if n slots are free then, else PoolFull."""
        available = self._free.count + self._tables[seq].tree.size
        if n > available:
            raise PoolFull(f"{n} slots needed, {available} are free")
        self._free.give(self._tables.drop_tree(seq))

    def _check_room(self) -> None:
        if len(self._tables) == self._max_sequences:
            raise PoolFull(f"1 more sequence needed, all of max_sequences={self._max_sequences} are open")

    def _new_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1


class Replica:
    """A rank's tables, equal to the coordinator's: it replays the same entries. Once Fenced, every call raises."""

    def __init__(self, num_slots: int) -> None:
        self._tables = SequenceTables(num_slots)
        self._applied = 0
        self._answers = {0: (b"", self._tables.digest())}  # number -> hash of the entry, digest after it
        self._fenced: Fenced | None = None

    def apply(self, first: int, entries: Listlike[Entry]) -> str:
        """Apply entries number first, first + 1, ... and return the digest after the last of them.

        An entry applied before is compared with what was applied, not run again; the digest is the one of that time.
        Fenced: an entry is missing before `first`; a repeated entry differs from the one applied or is no longer among
        the last 4096; an entry does not fit the tables.
        """
        self._trusted()
        if first > self._applied + 1:
            self._fence(f"entry {self._applied + 1} is missing: the log goes on with entry {first}")
        for number, entry in enumerate(entries, first):
            body = blake2b(msgspec.msgpack.encode(entry), digest_size=8).digest()
            if number > self._applied:
                self._run(number, entry, body)
            elif self._answer(number)[0] != body:
                self._fence(f"entry {number} was repeated with another body")
        return self._answer(first + len(entries) - 1)[1]

    def length(self, seq: int) -> int:
        """Committed positions."""
        return self._trusted()[seq].length

    def prefix_slots(self, seq: int) -> Slots:
        """Slots of the committed positions, int32 [length], a read-only view that later changes leave as it is."""
        return self._trusted()[seq].prefix

    def tree_slots(self, seq: int) -> Slots:
        """Slots of the uncommitted tree's nodes, int32 [n], read-only; empty when there is none."""
        return self._trusted()[seq].tree

    def digest(self) -> str:
        """16 hex digits of the present tables."""
        return self._trusted().digest()

    def _trusted(self) -> SequenceTables:
        if self._fenced is not None:
            raise self._fenced
        return self._tables

    def _run(self, number: int, entry: Entry, body: bytes) -> None:
        try:
            entry.apply(self._tables)
        except ArgumentError as error:
            self._fence(f"entry {number} does not fit the tables: {error}")
        self._applied = number
        self._answers[number] = body, self._tables.digest()
        self._answers.pop(number - ANSWERS_KEPT, None)

    def _answer(self, number: int) -> tuple[bytes, str]:
        answer = self._answers.get(number)
        if answer is None:
            self._fence(f"entry {number} is not among the last {ANSWERS_KEPT} of {self._applied} applied")
        return answer

    def _fence(self, cause: str) -> NoReturn:
        self._fenced = Fenced(cause)
        raise self._fenced


def _wire(slots: Slots) -> bytes:
    return slots.astype(WIRE_INT32, copy=False).tobytes()


def _int32(argument: str, raw: bytes) -> npt.NDArray[Any]:
    if len(raw) % WIRE_INT32.itemsize:
        raise ArgumentError(argument, "bytes of int32", f"{len(raw)} bytes")
    return np.frombuffer(raw, WIRE_INT32)
