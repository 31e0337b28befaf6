"""The slot tables of all sequences: one state machine, run by the coordinator and by every rank.

Each changing method is one transition: it validates before it changes anything (ArgumentError) and returns the slots
that became free, int32.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tpverify.errors import ArgumentError
from tpverify.kv.digest import MASK64, SlotHash, sequence_hash
from tpverify.kv.slots import LIVE, NO_SLOTS, SCRATCH, Slots, SlotStates


@dataclass(slots=True)
class Sequence:
    """Slots of the committed positions and of the uncommitted tree's nodes, and the digest's terms of both."""

    buffer: Slots = field(default_factory=lambda: np.empty(64, np.int32))
    length: int = 0
    tree: Slots = field(default_factory=lambda: NO_SLOTS)
    prefix_sum: int = 0
    tree_sum: int = 0
    hash: int = 0

    @property
    def prefix(self) -> Slots:
        """int32 [length], read-only. Later changes leave it as it is: a committed position keeps its slot."""
        view = self.buffer[: self.length]
        view.flags.writeable = False
        return view

    def extend(self, slots: Slots) -> None:
        end = self.length + slots.size
        if end > self.buffer.size:
            grown = np.empty(max(end, 2 * self.buffer.size), np.int32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        self.buffer[self.length : end] = slots
        self.length = end


class SequenceTables:
    """Tables of a pool of num_slots slots, with the state of every slot and the structural digest kept up to date."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotStates(num_slots)
        self._slot_hash = SlotHash(num_slots)
        self._sequences: dict[int, Sequence] = {}
        self._digest = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq: int) -> Sequence:
        """The open sequence `seq`; ArgumentError if there is none."""
        sequence = self._sequences.get(seq) if type(seq) is int else None
        if sequence is None:
            raise ArgumentError("seq", "an open sequence", repr(seq))
        return sequence

    def digest(self) -> str:
        """16 hex digits, equal exactly when (up to 2^-64) all mappings, lengths and trees are."""
        return f"{self._digest:016x}"

    def open(self, seq: int) -> Slots:
        self._add(seq, Sequence())
        return NO_SLOTS

    def append(self, seq: int, slots: Slots) -> Slots:
        """Commit further positions. An uncommitted tree is dropped; its slots may be among the new ones."""
        sequence = self[seq]
        self.slots.check_free(slots, own=sequence.tree)
        freed = self.drop_tree(seq)
        self.slots.claim(slots, LIVE)
        self._commit(sequence, slots)
        self._rehash(seq, sequence)
        return freed

    def draft(self, seq: int, slots: Slots) -> Slots:
        """Give a tree's nodes, root first, their slots. An earlier tree is dropped; the new slots may be its."""
        sequence = self[seq]
        self.slots.check_free(slots, own=sequence.tree)
        freed = self.drop_tree(seq)
        self.slots.claim(slots, SCRATCH)
        sequence.tree, sequence.tree_sum = slots, self._slot_hash(slots, 0)
        self._rehash(seq, sequence)
        return freed

    def commit(self, seq: int, path: npt.NDArray[np.int32]) -> Slots:
        """The tree's nodes on `path` become the next committed positions where they lie; the others are freed."""
        sequence = self[seq]
        tree = sequence.tree
        if not tree.size:
            raise ArgumentError("seq", "a sequence with a drafted tree", seq)
        if not path.size or path[0] != 0 or path[-1] >= tree.size or not (path[1:] > path[:-1]).all():
            raise ArgumentError("path", f"ascending node indices from 0 to {tree.size - 1}, the root first", path)
        rejected = np.ones(tree.size, np.bool_)
        rejected.put(path, False)
        accepted, freed = tree.take(path), tree[rejected]
        self.slots.settle(accepted, freed)
        self._commit(sequence, accepted)
        self._clear_tree(seq, sequence)
        return freed

    def drop_tree(self, seq: int) -> Slots:
        """Free the uncommitted tree, if there is one."""
        sequence = self[seq]
        freed = sequence.tree
        if freed.size:
            self.slots.settle(NO_SLOTS, freed)
            self._clear_tree(seq, sequence)
        return freed

    def fork(self, seq: int, new: int) -> Slots:
        """Open `new` with the committed positions of `seq`: both read the same slots, neither writes them."""
        parent = self[seq]
        self._add(new, Sequence(buffer=parent.prefix.copy(), length=parent.length, prefix_sum=parent.prefix_sum))
        self.slots.share(parent.prefix)
        return NO_SLOTS

    def close(self, seq: int) -> Slots:
        """Drop the tree and the sequence; slots that no fork reads any longer become free."""
        tree = self.drop_tree(seq)
        sequence = self._sequences.pop(seq)
        self._digest = (self._digest - sequence.hash) & MASK64
        return np.concatenate((tree, self.slots.release(sequence.prefix)))

    def _add(self, seq: int, sequence: Sequence) -> None:
        if seq in self._sequences:
            raise ArgumentError("seq", "a sequence number not in use", seq)
        self._sequences[seq] = sequence
        self._rehash(seq, sequence)

    def _commit(self, sequence: Sequence, slots: Slots) -> None:
        sequence.prefix_sum = (sequence.prefix_sum + self._slot_hash(slots, sequence.length)) & MASK64
        sequence.extend(slots)

    def _clear_tree(self, seq: int, sequence: Sequence) -> None:
        sequence.tree, sequence.tree_sum = NO_SLOTS, 0
        self._rehash(seq, sequence)

    def _rehash(self, seq: int, sequence: Sequence) -> None:
        hash_ = sequence_hash(seq, sequence.length, sequence.prefix_sum, sequence.tree.size, sequence.tree_sum)
        self._digest = (self._digest + hash_ - sequence.hash) & MASK64
        sequence.hash = hash_
