"""The numbered log of table changes: the coordinator writes it (KvLog), every rank replays it (Replica).

One writer and one order: a rank that misses an entry, or is given another in its place, is fenced and replaced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpverify.config import MAX_NODES, check_int
from tpverify.errors import ArgumentError, PoolFull, describe
from tpverify.kv import extents
from tpverify.kv.defrag import GOAL, Job, Mask, evacuate, plan
from tpverify.kv.entries import (
    Append,
    Close,
    Commit,
    Draft,
    Entry,
    Evict,
    Fork,
    Move,
    Open,
    Resize,
    Retain,
    Retire,
    int32,
)
from tpverify.kv.quarantine import Quarantine
from tpverify.kv.radix import RadixCache, Tokens
from tpverify.kv.replica import Fenced, Replica
from tpverify.kv.slots import FREE, LIVE, NO_SLOTS, FreeSlots, Slots
from tpverify.kv.snapshot import Snapshot, held
from tpverify.kv.table import SequenceTables

__all__ = [
    "Append", "Close", "Commit", "Draft", "Entry", "Evict", "Fenced", "Fork", "KvLog", "Lease", "Move", "Moved",
    "Open", "Replica", "Resize", "Retain", "Retire",
]  # fmt: skip


NOBODY, CACHE = -1, -2  # owners that are no sequence


@dataclass(frozen=True)
class Moved:
    """One wave of moves. moves: rows that change slots with the next step. extents_before, extents_after: of all open
    sequences together, prefixes counted once a reader. done: no call without a change in between would move anything
    further; while it is false, acknowledge two steps and call again."""

    moves: int
    extents_before: int
    extents_after: int
    done: bool


@dataclass(frozen=True, eq=False)
class Lease:
    """Committed rows of a sequence that stay in their slots until the lease is given back. slots int32 and generations
    int64, [length]."""

    seq: int
    slots: Slots
    generations: npt.NDArray[np.int64]


class KvLog:
    """The coordinator's tables, allocator and prefix cache. A call validates fully before it changes anything, then
    records entries.

    num_slots counts rows of the pool; slot 0, the padding sink, is never handed out. No sequence number is used twice.
    Errors: ArgumentError for a sequence that is not open or an argument out of range; PoolFull for max_sequences
    already open, or for too few free slots even if everything in the cache that no sequence reads were evicted.
    """

    def __init__(self, num_slots: int, max_sequences: int = 4096) -> None:
        self._tables = SequenceTables(num_slots)
        self._free = FreeSlots(num_slots)
        self._cache = RadixCache(self._tables.slots)
        self._quarantine = Quarantine()
        self._job: Job | None = None
        self._pins = np.zeros(num_slots, np.int32)
        self._max_sequences = check_int("max_sequences", max_sequences, 1, 2**31 - 1)
        self._next_seq = 0
        self._recorded = 0
        self._pending: list[Entry] = []

    def open(self, tokens: npt.ArrayLike | None = None) -> int:
        """Number of a new sequence. With the token ids, int [n], of what it is to hold, it starts with those positions
        that the cache has; length(seq) says how many. The last token is never among them, since someone needs its
        output: the caller computes at least that one."""
        self._check_room()
        prefix = NO_SLOTS if tokens is None else self._cache.match(_as_tokens(tokens)[:-1])
        self._record(Open(self._new_seq(), extents.pack(prefix)))
        return self._next_seq - 1

    def append(self, seq: int, n: int) -> Slots:
        """Slots, int32 [n], of n further committed positions. An uncommitted tree is dropped: its root moved."""
        n = check_int("n", n, 1, 2**31 - 1)
        self._drop_tree_for(seq, n)
        self._record(Append(seq, int32(self._free.take_run(n))))
        return self.prefix_slots(seq)[-n:]

    def draft(self, seq: int, n: int) -> Slots:
        """Scratch slots, int32 [n], of a tree of n <= 1024 nodes, root included. An uncommitted tree is dropped."""
        n = check_int("n", n, 1, MAX_NODES)
        self._drop_tree_for(seq, n)
        self._record(Draft(seq, int32(self._free.take_recent(n))))
        return self.tree_slots(seq)

    def draft_all(self, nodes: Mapping[int, int]) -> None:
        """`draft` for several sequences: slots for all of their trees, or PoolFull and no change."""
        own = {seq: self._reusable(seq) for seq in nodes}
        self._make_room(sum(nodes.values()), sum(own.values()))
        for seq in sorted(nodes, key=lambda seq: nodes[seq] - own[seq]):  # what shrinks makes room for what grows
            self.draft(seq, nodes[seq])

    def commit(self, seq: int, path: npt.ArrayLike) -> None:
        """Commit the tree's nodes `path` (int, ascending, path[0] == 0) where they lie, and free the others' slots."""
        nodes = np.asarray(path)
        if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
            raise ArgumentError("path", "node indices, int [accepted]", path)
        wire = nodes.astype(extents.WIRE_INT32)
        if wire.tolist() != nodes.tolist():
            raise ArgumentError("path", "node indices that fit int32", path)
        self._record(Commit(seq, wire.tobytes()))

    def fork(self, seq: int) -> int:
        """Number of a new sequence that reads the committed positions of `seq` in the same slots; a tree stays."""
        self._tables[seq]
        self._check_room()
        self._record(Fork(seq, self._new_seq()))
        return self._next_seq - 1

    def cache(self, seq: int, tokens: npt.ArrayLike) -> None:
        """Keep the rows of the first n committed positions, whose token ids are tokens int [n], for later sequences.
        Those that the cache already has are not kept twice."""
        key = _as_tokens(tokens)
        sequence = self._tables[seq]
        if key.size > sequence.length:
            raise ArgumentError("tokens", f"ids of at most the {sequence.length} committed positions", key.size)
        new = sequence.prefix[self._cache.cached(key) : key.size]
        if not new.size:
            return
        if self._tables.slots.cached.take(new).any():
            raise ArgumentError("tokens", "the ids under which these rows are already cached", key)
        self._cache.insert(key, sequence.prefix[: key.size])
        self._record(Retain(extents.pack(new)))

    def shared(self, tokens: npt.ArrayLike) -> int:
        """How many slots that open(tokens) would start with are read by an open sequence, so that they cost nothing."""
        return self._cache.read(_as_tokens(tokens)[:-1])

    def close(self, seq: int, tokens: npt.ArrayLike | None = None) -> None:
        """End a sequence; slots that no fork reads any longer become free. With the token ids of its first committed
        positions, the cache keeps those."""
        if tokens is not None:
            self.cache(seq, tokens)
        self._record(Close(seq))

    def make_room(self, n: int) -> None:
        """Have n slots free, at the cost of what the cache keeps for nobody: the least recently used goes first."""
        self._make_room(n, 0)

    def defrag(self, most: int, *, goal: int = 1, threshold: int = 1) -> Moved:
        """Move up to `most` rows so that chains of more than `threshold` extents come to have `goal`, or up to four
        where there is no room for fewer. With a goal above 1 (at most 4) long extents stay where they are.

        A chain is what a sequence has committed itself, or a branch of the cache, whose rows move once for all readers.
        Nothing moves while sources of earlier moves are in quarantine.
        """
        most = check_int("most", most, 1, 2**31 - 1)
        goal = check_int("goal", goal, 1, GOAL)
        threshold = max(goal, check_int("threshold", threshold, 1, 2**31 - 1))
        before = sum(self.extents().values())
        if self._quarantine:
            return Moved(0, before, before, False)
        pinned = self._pins > 0
        pinned[self._tables.slots.limit :] = True  # what lies there is for `resize` to move: its slots do not come back
        for _ in range(2):  # the job under way may turn out to be over
            if self._job is None:
                self._job = self._plan(pinned, goal, threshold, most)
                if self._job is None:
                    break
                self._refill()
            src, dst = self._job.wave(self._tables.slots, pinned, most)
            if src.size:
                self._move(src, dst)
                return Moved(src.size, before, sum(self.extents().values()), False)
            self._end_job()
        return Moved(0, before, before, True)

    def resize(self, num_slots: int) -> Moved:
        """Hand out only slots below num_slots from now on, and move what lies above into what is free below.

        done says that nothing is left above, neither rows nor sources in quarantine. Until then call again: after two
        acknowledged steps; rows of a tree can move once it is committed, leased rows never. PoolFull if what is read
        does not fit. A larger number than before gives slots back.
        """
        num_slots = check_int("num_slots", num_slots, 2, self._tables.num_slots)
        states = self._tables.slots
        capacity, counts = self._tables.num_slots, states.counts()
        used, evictable = counts["live"] + counts["scratch"], self._cache.evictable(capacity)
        if used - evictable > num_slots - 1:
            raise PoolFull(
                f"{used - evictable} slots are in use, {num_slots - 1} would be left", needed=used - evictable
            )
        before = sum(self.extents().values())
        self._end_job()
        if num_slots != states.limit:
            self._record(Resize(num_slots))
            self._refill()
        if used > num_slots - 1:
            self._record(Evict(extents.pack(self._cache.evict(used - (num_slots - 1), capacity))))
        src, dst = evacuate([chain for _, chain in self._chains()], states, self._pins > 0)
        if src.size:
            self._move(src, dst)
        done = not (states.states[num_slots:] != FREE).any()
        return Moved(src.size, before, sum(self.extents().values()), done)

    def acknowledge(self) -> None:
        """Every rank has answered the step that carried all entries handed out so far, with the digest expected."""
        leaving = self._quarantine.step(self._recorded - len(self._pending))
        if leaving:
            self._record(Retire(extents.pack(np.concatenate(leaving))))

    def lease(self, seq: int) -> Lease:
        """The committed rows of a sequence, which stay in their slots until `end_lease`: for a transfer."""
        slots = self.prefix_slots(seq)
        self._pins[slots] += 1
        return Lease(seq, slots, self._tables.slots.generations.take(slots))

    def intact(self, lease: Lease) -> bool:
        """Whether the leased slots still hold the rows that they held: the sequence may have been closed since."""
        return bool((self._tables.slots.generations.take(lease.slots) == lease.generations).all())

    def end_lease(self, lease: Lease) -> None:
        self._pins[lease.slots] -= 1

    def length(self, seq: int) -> int:
        """Committed positions."""
        return self._tables[seq].length

    def prefix_slots(self, seq: int) -> Slots:
        """Slots of the committed positions, int32 [length], a read-only view that later changes leave as it is."""
        return self._tables[seq].prefix

    def tree_slots(self, seq: int) -> Slots:
        """Slots of the uncommitted tree's nodes, int32 [n], read-only; empty when there is none."""
        return self._tables[seq].tree

    def extents(self) -> dict[int, int]:
        """Of every open sequence, in how many runs of slots its committed positions lie."""
        prefixes = [sequence.prefix for _, sequence in self._tables.items()]
        return dict(zip((seq for seq, _ in self._tables.items()), extents.counts(prefixes), strict=True))

    def slot_map(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Of every slot, its state (see slots.py) and its owner: a sequence's number, CACHE or NOBODY."""
        owners = np.full(self._tables.num_slots, NOBODY, np.int32)
        for owner, chain in self._chains():
            owners[chain] = owner
        for seq, sequence in self._tables.items():
            owners[sequence.tree] = seq
        return self._tables.slots.states.copy(), owners

    def held(self) -> Slots:
        """Slots whose rows somebody may still read, int32 [n], as `snapshot.held` orders them."""
        return held(self._tables.slots)

    def pending(self) -> tuple[int, list[Entry]]:
        """Number (from 1) of the first entry that this call has not yet handed out, and all entries from there on."""
        entries, self._pending = self._pending, []
        return self._recorded - len(entries) + 1, entries

    def snapshot(self) -> Snapshot:
        """The tables as they are now, entries that are still pending included, for a replica that joins."""
        return Snapshot.of(self._tables, self._recorded)

    def digest(self) -> str:
        """16 hex digits, equal to those of every replica that applied the same entries."""
        return self._tables.digest()

    def stats(self) -> dict[str, int]:
        """Slots free, scratch, live, quarantined and withheld, num_slots - 1 in all; of the live ones those shared,
        cached, and evictable from the cache; sequences; entries recorded. O(num_slots)."""
        return self._tables.slots.counts() | {
            "evictable": self._cache.evictable(self._tables.slots.limit),
            "sequences": len(self._tables),
            "entries": self._recorded,
        }

    def _record(self, entry: Entry) -> None:
        self._give(entry.apply(self._tables))
        self._pending.append(entry)
        self._recorded += 1

    def _give(self, freed: Slots) -> None:
        """To the free list, but for slots that a job needs or that are withheld."""
        if self._job is not None:
            freed = freed[~self._job.windows.take(freed)]
        if self._tables.slots.limit < self._tables.num_slots:
            freed = freed[freed < self._tables.slots.limit]
        self._free.give(freed)

    def _refill(self) -> None:
        """The free list anew, from the states."""
        free = self._tables.slots.free()
        self._free.reset(free if self._job is None else free[~self._job.windows.take(free)])

    def _end_job(self) -> None:
        if self._job is not None:
            self._job = None
            self._refill()

    def _move(self, src: Slots, dst: Slots) -> None:
        order = np.argsort(dst)
        src, dst = src.take(order), dst.take(order)
        self._cache.move(src, dst)
        self._record(Move(extents.pack(src, dst)))
        self._quarantine.add(self._recorded, src)
        self._refill()

    def _plan(self, pinned: Mask, goal: int, threshold: int, most: int) -> Job | None:
        chains = [chain for _, chain in self._chains()]
        return plan(chains, self._tables.slots, pinned, goal=goal, threshold=threshold, most=most)

    def _chains(self) -> Iterator[tuple[int, Slots]]:
        """All live slots in chains, with their owners; each slot in one. See defrag.py."""
        slots = self._tables.slots
        cached = int(np.count_nonzero(slots.cached))
        left = int(np.count_nonzero(slots.states == LIVE)) - cached
        yield from ((CACHE, chain) for chain in self._cache.chains())
        for seq, sequence in self._tables.items():
            own = sequence.prefix[sequence.inherited :]
            own = own[~slots.cached.take(own)] if cached else own
            left -= own.size
            yield seq, own
        if left:  # what forks have inherited from sequences that have ended since
            yield from self._orphans()

    def _orphans(self) -> Iterator[tuple[int, Slots]]:
        slots = self._tables.slots
        unclaimed = (slots.states == LIVE) & ~slots.cached
        for _, sequence in self._tables.items():
            unclaimed[sequence.prefix[sequence.inherited :]] = False
        for seq, sequence in self._tables.items():
            inherited = sequence.prefix[: sequence.inherited]
            yield seq, inherited[unclaimed.take(inherited)]
            unclaimed[inherited] = False

    def _drop_tree_for(self, seq: int, n: int) -> None:
        """Drop the sequence's tree if n slots can be had then, else PoolFull."""
        self._make_room(n, self._reusable(seq))
        self._give(self._tables.drop_tree(seq))

    def _reusable(self, seq: int) -> int:
        """Slots that dropping the sequence's tree gives back."""
        tree, limit = self._tables[seq].tree, self._tables.slots.limit
        return tree.size if limit == self._tables.num_slots else int(np.count_nonzero(tree < limit))

    def _make_room(self, n: int, own: int) -> None:
        """n slots, `own` of which the caller will free itself."""
        if n > self._free.count + own:
            self._end_job()
        free = self._free.count + own
        if n <= free:
            return
        limit = self._tables.slots.limit
        evictable = self._cache.evictable(limit)
        if n > free + evictable:
            more = f", {evictable} more can be evicted" if evictable else ""
            waits = ", sources of moves are in quarantine" if self._quarantine else ""
            raise PoolFull(f"{n} slots needed, {free} are free{more}{waits}", needed=n, free=free, evictable=evictable)
        self._record(Evict(extents.pack(self._cache.evict(n - free, limit))))

    def _check_room(self) -> None:
        if len(self._tables) == self._max_sequences:
            raise PoolFull(f"1 more sequence needed, all of max_sequences={self._max_sequences} are open")

    def _new_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1


def _as_tokens(tokens: npt.ArrayLike) -> Tokens:
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that numpy does not take
        ids = np.empty((0, 0))
    keys = ids.astype(np.int64) if ids.dtype.kind in "iu" or not ids.size else None
    if ids.ndim != 1 or keys is None or ids.dtype == np.uint64 and (keys < 0).any():
        raise ArgumentError("tokens", "token ids, int [n], that fit int64", describe(tokens))
    return keys
