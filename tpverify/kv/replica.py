"""A rank's side of the log: it replays what the coordinator wrote, or is fenced."""

from collections.abc import Sequence as Listlike
from typing import NoReturn

import msgspec
import numpy as np

from tpverify.errors import ArgumentError
from tpverify.kv.entries import Entry, Move, Resize
from tpverify.kv.slots import FREE, LIVE, Slots
from tpverify.kv.snapshot import Snapshot
from tpverify.kv.table import SequenceTables

ANSWERS_KEPT = 4096  # entries whose repetition a replica still answers


class Fenced(RuntimeError):
    """A replica saw a gap or a contradiction in its log, or its rows are not what they were. It must be replaced."""


class Replica:
    """A rank's tables, equal to the coordinator's: it replays the same entries. Once Fenced, every call raises."""

    def __init__(self, num_slots: int) -> None:
        self._tables = SequenceTables(num_slots)
        self._applied, self._joined = 0, -1
        self._answers = {0: (0, self._tables.digest())}  # number -> hash of the entry, digest after it
        self._moves: list[tuple[Slots, Slots]] = []
        self._resized = False
        self._fenced: Fenced | None = None

    @classmethod
    def restore(cls, num_slots: int, snapshot: Snapshot) -> "Replica":
        """A replica that joins at the snapshot. It takes entries up to there, which it cannot know, for repeats."""
        replica = cls(num_slots)
        replica._tables = snapshot.tables(num_slots)
        replica._joined = replica._applied = snapshot.number
        replica._answers = {snapshot.number: (0, replica._tables.digest())}
        return replica

    def apply(self, first: int, entries: Listlike[Entry]) -> str:
        """Apply entries number first, first + 1, ... and return the digest after the last of them.

        An entry applied before is compared with what was applied, not run again; the digest is the one of that time.
        Fenced: an entry is missing before `first`; a repeated entry differs from the one applied or is no longer among
        the last 4096; an entry does not fit the tables.
        """
        self._trusted()
        if first > self._applied + 1:
            self.fence(f"entry {self._applied + 1} is missing: the log goes on with entry {first}")
        for number, entry in enumerate(entries, first):
            body = hash(msgspec.msgpack.encode(entry))  # keyed, and of use within this process alone
            if number > self._applied:
                self._run(number, entry, body)
            elif number > self._joined and self._answer(number)[0] != body:
                self.fence(f"entry {number} was repeated with another body")
        return self._answer(first + len(entries) - 1)[1]

    def take_moves(self) -> list[tuple[Slots, Slots]]:
        """Sources and destinations, int32 [n] each, of every move applied since the last call: the rank copies these
        rows, one move after the other, before anything else is read or written."""
        self._trusted()
        moves, self._moves = self._moves, []
        return moves

    def take_release(self) -> int | None:
        """Once after a Resize: the limit from which on no slot holds anything any longer."""
        slots = self._trusted().slots
        if not self._resized or (slots.states[slots.limit :] != FREE).any():
            return None
        self._resized = False
        return slots.limit

    def length(self, seq: int) -> int:
        """Committed positions."""
        return self._trusted()[seq].length

    def prefix_slots(self, seq: int) -> Slots:
        """Slots of the committed positions, int32 [length], a read-only view that later changes leave as it is."""
        return self._trusted()[seq].prefix

    def tree_slots(self, seq: int) -> Slots:
        """Slots of the uncommitted tree's nodes, int32 [n], read-only; empty when there is none."""
        return self._trusted()[seq].tree

    def positions(self, slots: Slots) -> Slots:
        """Logical positions of the rows in these slots, int32 [n]; -1 where no committed row is."""
        of = self._trusted().slots
        return np.where(of.states.take(slots) == LIVE, of.positions.take(slots), -1)

    def readers(self, slot: int) -> list[tuple[int, int]]:
        """Sequences that read the committed row in this slot, each with the row's position: to name it in an error."""
        tables = self._trusted()
        position = int(tables.slots.positions[slot])
        held = (seq for seq, s in tables.items() if position < s.length and s.prefix[position] == slot)
        return [(seq, position) for seq in held]

    def digest(self) -> str:
        """16 hex digits of the present tables."""
        return self._trusted().digest()

    def fence(self, cause: str) -> NoReturn:
        """Raise Fenced, now and from every later call: what this rank holds cannot be trusted."""
        self._fenced = Fenced(cause)
        raise self._fenced

    def _trusted(self) -> SequenceTables:
        if self._fenced is not None:
            raise self._fenced
        return self._tables

    def _run(self, number: int, entry: Entry, body: int) -> None:
        try:
            entry.apply(self._tables)
        except ArgumentError as error:
            self.fence(f"entry {number} does not fit the tables: {error}")
        if isinstance(entry, Move):
            self._moves.append(entry.pairs(self._tables.num_slots))
        self._resized |= isinstance(entry, Resize)
        self._applied = number
        self._answers[number] = body, self._tables.digest()
        self._answers.pop(number - ANSWERS_KEPT, None)

    def _answer(self, number: int) -> tuple[int, str]:
        answer = self._answers.get(number)
        if answer is None:
            self.fence(f"entry {number} is not among the last {ANSWERS_KEPT} of {self._applied} applied")
        return answer
