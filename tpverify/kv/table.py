"""The slot tables of all sequences: one state machine, run by the coordinator and by every rank.

Each changing method is one transition: it validates before it changes anything (ArgumentError) and returns the slots
that became free, int32.
"""

from collections.abc import ItemsView, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tpverify import native
from tpverify.config import check_int
from tpverify.errors import ArgumentError
from tpverify.kv.digest import MASK64, SlotHash, pool_hash, sequence_hash
from tpverify.kv.native_tables import NativeTables
from tpverify.kv.slots import LIVE, NO_SLOTS, QUARANTINED, SCRATCH, Slots, SlotStates


@dataclass(slots=True)
class Sequence:
    """Slots of the committed positions and of the uncommitted tree's nodes, and the digest's terms of both. The first
    `inherited` positions were there when it began: the cache's or another sequence's."""

    buffer: Slots = field(default_factory=lambda: np.empty(64, np.int32))
    length: int = 0
    inherited: int = 0
    tree: Slots = field(default_factory=lambda: NO_SLOTS)
    prefix_sum: int = 0
    tree_sum: int = 0
    hash: int = 0

    @property
    def prefix(self) -> Slots:
        """int32 [length], read-only. Later changes leave it as it is: moves write a new buffer."""
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

    def reads(self, slots: Slots, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
        """Indices of those slots that the prefix has, each at its position."""
        inside = np.flatnonzero(positions < self.length)
        return inside[self.buffer.take(positions.take(inside)) == slots.take(inside)]

    def redirect(self, positions: npt.NDArray[np.int32], slots: Slots) -> None:
        self.buffer = self.buffer.copy()
        self.buffer.put(positions, slots)


class SequenceTables:
    """Tables of a pool of num_slots slots, with the state of every slot and the structural digest kept up to date."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotStates(num_slots)
        self.num_slots = num_slots
        self._slot_hash = SlotHash(num_slots)
        library = native.host()
        self._native = NativeTables(library, self.slots, self._slot_hash) if library is not None else None
        self._sequences: dict[int, Sequence] = {}
        self._digest = 0  # of the sequences
        self._cached_sum = self._quarantined_sum = self._pool = 0
        self._rehash_pool()

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq: int) -> Sequence:
        """The open sequence `seq`; ArgumentError if there is none."""
        sequence = self._sequences.get(seq) if type(seq) is int else None
        if sequence is None:
            raise ArgumentError("seq", "an open sequence", repr(seq))
        return sequence

    def items(self) -> ItemsView[int, Sequence]:
        """Numbers and sequences, the oldest first."""
        return self._sequences.items()

    def digest(self) -> str:
        """16 hex digits, equal exactly when (up to 2^-64) all mappings, lengths and trees, the cached and the
        quarantined slots and the limit are."""
        return f"{(self._digest + self._pool) & MASK64:016x}"

    def open(self, seq: int, cached: Slots) -> Slots:
        """A sequence whose first positions are these slots, which the cache keeps for them."""
        slots = self.slots
        if cached.size:
            slots.check_distinct("prefix", cached, LIVE, "cached slots")
            fits = slots.positions.take(cached) == np.arange(cached.size)
            if not (fits & slots.cached.take(cached)).all():
                raise ArgumentError("prefix", "the cached slots of positions 0, 1, 2, ...", cached)
        sequence = Sequence(inherited=cached.size, prefix_sum=self._slot_hash(cached, 0))
        self._add(seq, sequence, cached)
        return NO_SLOTS

    def append(self, seq: int, slots: Slots) -> Slots:
        """Commit further positions. An uncommitted tree is dropped; its slots may be among the new ones."""
        sequence = self[seq]
        self.slots.check_free(slots, own=sequence.tree)
        freed = self.drop_tree(seq)
        self.slots.claim(slots, LIVE)
        self._commit(seq, sequence, slots)
        self._rehash(seq, sequence)
        return freed

    def draft(self, seq: int, slots: Slots) -> Slots:
        """Give a tree's nodes, root first, their slots. An earlier tree is dropped; the new slots may be its."""
        sequence = self[seq]
        if self._native is not None and not sequence.tree.size:
            done = self._native.draft(seq, sequence.length, sequence.prefix_sum, slots)
            if done is not None:
                sequence.tree = slots
                sequence.tree_sum, hash_ = done
                self._exchange(sequence, hash_)
                return NO_SLOTS
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
        if self._native is not None:
            done = self._native.commit(seq, sequence.length, sequence.prefix_sum, tree, path)
            if done is not None:
                accepted, freed, sequence.prefix_sum, hash_ = done
                sequence.extend(accepted)
                sequence.tree, sequence.tree_sum = NO_SLOTS, 0
                self._exchange(sequence, hash_)
                return freed
        if not tree.size:
            raise ArgumentError("seq", "a sequence with a drafted tree", seq)
        if not path.size or path[0] != 0 or path[-1] >= tree.size or not (path[1:] > path[:-1]).all():
            raise ArgumentError("path", f"ascending node indices from 0 to {tree.size - 1}, the root first", path)
        rejected = np.ones(tree.size, np.bool_)
        rejected.put(path, False)
        accepted, freed = tree.take(path), tree[rejected]
        self.slots.settle(accepted, freed)
        self._commit(seq, sequence, accepted)
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
        self._add(new, Sequence(inherited=parent.length, prefix_sum=parent.prefix_sum), parent.prefix)
        return NO_SLOTS

    def close(self, seq: int) -> Slots:
        """Drop the tree and the sequence; slots that no fork and no cache reads any longer become free."""
        tree = self.drop_tree(seq)
        sequence = self._sequences.pop(seq)
        self._digest = (self._digest - sequence.hash) & MASK64
        return np.concatenate((tree, self.slots.release(sequence.prefix)))

    def retain(self, slots: Slots) -> Slots:
        """The cache becomes one more reader of these committed positions."""
        self.slots.check_distinct("slots", slots, LIVE, "slots of committed positions")
        if self.slots.cached.take(slots).any():
            raise ArgumentError("slots", "slots that are not yet cached", slots)
        self.slots.share(slots)
        self.slots.cached.put(slots, True)
        self._cached_sum += self._slot_hash.at(slots, self.slots.positions.take(slots))
        self._rehash_pool()
        return NO_SLOTS

    def evict(self, slots: Slots) -> Slots:
        """The cache reads these slots no longer."""
        self.slots.check_distinct("slots", slots, LIVE, "cached slots")
        if not self.slots.cached.take(slots).all():
            raise ArgumentError("slots", "cached slots", slots)
        self.slots.cached.put(slots, False)
        self._cached_sum -= self._slot_hash.at(slots, self.slots.positions.take(slots))
        self._rehash_pool()
        return self.slots.release(slots)

    def move(self, src: Slots, dst: Slots) -> Slots:
        """Row src[i] is row dst[i] from now on, for every sequence and for the cache. dst ascends. Old rows stay valid,
        and their slots unused, until they retire."""
        self.slots.check_distinct("src", src, LIVE, "slots of committed positions")
        self.slots.check_free(dst, own=NO_SLOTS)
        if src.size != dst.size:
            raise ArgumentError("dst", f"{src.size} slots, one for each of src", dst.size)
        positions, cached = self.slots.positions.take(src), self.slots.cached.take(src)
        change = self._slot_hash.terms(dst, positions) - self._slot_hash.terms(src, positions)
        readers = self.slots.readers.take(src) - cached

        def redirect(seq: int, rows: npt.NDArray[np.intp]) -> None:
            sequence = self._sequences.get(seq)
            if sequence is None:
                return
            hits = rows[sequence.reads(src.take(rows), positions.take(rows))]
            if hits.size:
                sequence.redirect(positions.take(hits), dst.take(hits))
                sequence.prefix_sum = (sequence.prefix_sum + int(change.take(hits).sum())) & MASK64
                self._rehash(seq, sequence)
                readers[hits] -= 1

        owners = self.slots.owners.take(src)
        by_owner = np.argsort(owners, kind="stable")
        for rows in np.split(by_owner, np.flatnonzero(np.diff(owners.take(by_owner))) + 1):
            redirect(int(owners[rows[0]]), rows)
        for seq in self._sequences:  # what has other readers than its owner
            rows = np.flatnonzero(readers)
            if not rows.size:
                break
            redirect(seq, rows)
        assert not readers.any(), "a slot is read at its position or not at all"
        self.slots.move(src, dst)
        self._cached_sum += int(change[cached].sum())
        self._quarantined_sum += self._slot_hash.at(src, np.zeros_like(src))
        self._rehash_pool()
        return NO_SLOTS

    def retire(self, slots: Slots) -> Slots:
        """Sources of moves that no rank can still read become free."""
        self.slots.check_distinct("slots", slots, QUARANTINED, "quarantined slots")
        self.slots.retire(slots)
        self._quarantined_sum -= self._slot_hash.at(slots, np.zeros_like(slots))
        self._rehash_pool()
        return slots

    def resize(self, limit: int) -> Slots:
        """Slots from `limit` on are not claimed from now on; what they hold stays until it moves or goes."""
        self.slots.limit = check_int("num_slots", limit, 2, self.num_slots)
        self._rehash_pool()
        return NO_SLOTS

    def restore(
        self,
        sequences: Iterable[tuple[int, Slots, Slots]],
        cached: Slots,
        positions: Slots,
        quarantined: Slots,
        limit: int,
    ) -> None:
        """Fill empty tables: sequences are (number, prefix, tree); cached slots come with their positions."""
        slots = self.slots
        for seq, prefix, tree in sequences:
            slots.states.put(prefix, LIVE)
            slots.place(prefix, seq, 0)
            self._add(seq, Sequence(inherited=prefix.size, prefix_sum=self._slot_hash(prefix, 0)), prefix)
            if tree.size:
                self.draft(seq, tree)
        if cached.size:
            slots.states.put(cached, LIVE)
            slots.positions.put(cached, positions)
            self.retain(cached)
        slots.states.put(quarantined, QUARANTINED)
        self._quarantined_sum = self._slot_hash.at(quarantined, np.zeros_like(quarantined))
        self.resize(limit)

    def _add(self, seq: int, sequence: Sequence, prefix: Slots) -> None:
        if seq in self._sequences:
            raise ArgumentError("seq", "a sequence number not in use", seq)
        sequence.extend(prefix)
        self.slots.share(prefix)
        self._sequences[seq] = sequence
        self._rehash(seq, sequence)

    def _commit(self, seq: int, sequence: Sequence, slots: Slots) -> None:
        sequence.prefix_sum = (sequence.prefix_sum + self._slot_hash(slots, sequence.length)) & MASK64
        self.slots.place(slots, seq, sequence.length)
        sequence.extend(slots)

    def _clear_tree(self, seq: int, sequence: Sequence) -> None:
        sequence.tree, sequence.tree_sum = NO_SLOTS, 0
        self._rehash(seq, sequence)

    def _rehash(self, seq: int, sequence: Sequence) -> None:
        hash_ = sequence_hash(seq, sequence.length, sequence.prefix_sum, sequence.tree.size, sequence.tree_sum)
        self._exchange(sequence, hash_)

    def _exchange(self, sequence: Sequence, hash_: int) -> None:
        """The digest counts the sequence by this hash from now on."""
        self._digest = (self._digest + hash_ - sequence.hash) & MASK64
        sequence.hash = hash_

    def _rehash_pool(self) -> None:
        self._pool = pool_hash(self._cached_sum, self._quarantined_sum, self.slots.limit)
