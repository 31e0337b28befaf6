"""A log, ranks, and a channel between them that loses, repeats, delays and alters; random operations on all of it."""

import random
from collections import deque

import msgspec
import numpy as np
import pytest
from kv_fake import FAULTS, FakeRank, Message, Sequence, deliver, encode, rows, tag
from kv_model import Model, random_parents, random_path

from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.log import KvLog, Replica
from tpverify.kv.slots import FREE, LIVE, QUARANTINED, SCRATCH
from tpverify.kv.snapshot import Snapshot


def extents(slots):
    return sum(i == 0 or slots[i] != slots[i - 1] + 1 for i in range(len(slots)))


class World:
    """Operations take a random.Random and check what they return; `step` and `check` compare everything with the
    tags."""

    def __init__(self, num_slots=160, ranks=3, max_sequences=6, vocabulary=2, faults=0.0):
        self.num_slots, self.max_sequences, self.vocabulary, self.faults = num_slots, max_sequences, vocabulary, faults
        self.log = KvLog(num_slots, max_sequences)
        self.ranks = [FakeRank(num_slots) for _ in range(ranks)]
        self.sequences: dict[int, Sequence] = {}
        self.leases = []
        self.number = 0
        self.sent = deque(maxlen=4)
        self.read_late = deque(maxlen=2)  # what the steps before this one may still be reading: (seq, slots, tags)
        self.counts = dict.fromkeys(["steps", "replaced", "moves", "evicted", *FAULTS], 0)

    # --- operations

    def open(self, rng):
        if len(self.sequences) == self.max_sequences:
            return
        tokens = self._tokens(rng, rng.randint(1, 40)) if rng.random() < 0.8 else None
        if tokens and self.sequences and rng.random() < 0.5:
            tokens = rng.choice(list(self.sequences.values())).tokens[: rng.randint(0, 60)] + tokens
        seq = self.log.open(tokens)
        length = self.log.length(seq)
        self.sequences[seq] = sequence = Sequence()
        if tokens is None:
            assert length == 0
            return
        assert length == min(self._cached(tokens), len(tokens) - 1)
        sequence.extend(tokens[:length])
        self._append(rng, seq, tokens[length:])

    def append(self, rng):
        if self.sequences:
            self._append(rng, self._any(rng), self._tokens(rng, rng.randint(1, 30)))

    def _append(self, rng, seq, tokens):
        if len(tokens) > self._room(seq):
            self._refused(seq, len(tokens), self.log.append)
            return
        assert len(self.log.append(seq, len(tokens))) == len(tokens)
        sequence = self.sequences[seq]
        start = len(sequence.tokens)
        sequence.extend(tokens)
        sequence.tree = None
        self.step(rng, [(seq, start, sequence.tags[start:])])

    def draft(self, rng):
        if not self.sequences:
            return
        seq, n = self._any(rng), rng.randint(1, 24)
        if n > self._room(seq):
            self._refused(seq, n, self.log.draft)
            return
        assert len(self.log.draft(seq, n)) == n
        sequence = self.sequences[seq]
        parents, tokens, tags = random_parents(rng, n), self._tokens(rng, n), []
        for parent, token in zip(parents, tokens, strict=True):
            before = tags[parent] if parent >= 0 else (sequence.tags[-1] if sequence.tags else 0)
            tags.append(tag(before, token))
        sequence.tree = parents, tokens, tags
        self.step(rng, [(seq, -1, tags)])

    def commit(self, rng):
        drafted = [seq for seq, sequence in self.sequences.items() if sequence.tree]
        if not drafted:
            return
        seq = rng.choice(drafted)
        parents, tokens, _ = self.sequences[seq].tree
        path = random_path(rng, parents)
        self.log.commit(seq, path)
        self.sequences[seq].extend([tokens[node] for node in path])
        self.sequences[seq].tree = None

    def fork(self, rng):
        if self.sequences and len(self.sequences) < self.max_sequences:
            seq = self._any(rng)
            self.sequences[self.log.fork(seq)] = Sequence(self.sequences[seq].tokens, self.sequences[seq].tags)

    def cache(self, rng):
        if self.sequences:
            seq = self._any(rng)
            tokens = self.sequences[seq].tokens
            self.log.cache(seq, tokens[: rng.randint(0, len(tokens))])

    def close(self, rng):
        if self.sequences:
            seq = self._any(rng)
            tokens = self.sequences.pop(seq).tokens
            self.log.close(seq, rng.choice([None, tokens, tokens, tokens[: len(tokens) // 2]]))

    def defrag(self, rng):
        most, goal = rng.choice([1, 7, 1000, 1000]), rng.choice([1, 4])
        moved = self.log.defrag(most, goal=goal, threshold=rng.choice([1, 4, 8]))
        assert moved.moves <= most
        assert moved.extents_after == sum(map(self._extents, self.sequences))
        self.counts["moves"] += moved.moves
        if rng.random() < 0.5:  # else the moves share a step with what comes next
            self.step(rng)

    def defrag_until_done(self, rng):
        """It comes to an end, leaves no more extents than before, and then there is nothing left to move."""
        fresh, before = self.log._job is None, self._chain_extents()
        for _ in range(5 * self.num_slots):
            moved = self.log.defrag(1000)
            self.counts["moves"] += moved.moves
            if moved.done:
                break
            self.step(rng)
        assert moved.done and moved.moves == 0
        assert not fresh or self._chain_extents() <= before
        assert self.log.defrag(1000).done

    def resize(self, rng):
        """Down to any number, sometimes twice in one step; what fits is moved below it in the end."""
        used = int(np.isin(self._states(), (LIVE, SCRATCH)).sum())
        close = max(2, min(used + rng.randint(0, 9), self.num_slots - 8))
        limits = rng.choices([self.num_slots, rng.randint(2, self.num_slots), close + 8, close, close - 1], k=2)
        for num_slots in sorted(limits, reverse=True):
            needed = int(np.isin(self._states(), (LIVE, SCRATCH)).sum()) - self._evictable(self.num_slots)
            try:
                moved = self.log.resize(max(2, num_slots))
            except PoolFull as full:
                assert full.needed == needed > num_slots - 1
                return
            assert needed <= max(2, num_slots) - 1
            self.counts["moves"] += moved.moves
            if rng.random() < 0.2:
                break
        if rng.random() < 0.5:
            return
        self.step(rng)
        limit = self.log._tables.slots.limit
        if not self.leases and not any(sequence.tree for sequence in self.sequences.values()):
            for _ in range(20):
                if moved.done:
                    break
                moved = self.log.resize(limit)
                self.step(rng)
            assert moved.done and not self._states()[limit:].any()

    def fill_up(self, rng):
        """Everything counted as room can be had."""
        if self.sequences:
            seq = self._any(rng)
            if room := self._room(seq):
                self._append(rng, seq, self._tokens(rng, room))

    def overfill(self, rng):
        if self.sequences:
            seq = self._any(rng)
            self._refused(seq, self._room(seq) + rng.randint(1, 40), rng.choice([self.log.draft, self.log.append]))

    def bad_path(self, rng):
        drafted = [seq for seq, sequence in self.sequences.items() if sequence.tree]
        if drafted:
            bad = rng.choice([[], [1], [0, 0], [0, 2, 1], [0, -1], [0, 10**6], [0, 2**32 + 1], [0.0]])
            with pytest.raises(ArgumentError, match="path"):
                self.log.commit(rng.choice(drafted), bad)

    def lease(self, rng):
        if self.sequences and len(self.leases) < 2:
            seq = self._any(rng)
            self.leases.append((self.log.lease(seq), self.log.prefix_slots(seq).tolist()))

    def end_lease(self, rng):
        if self.leases:
            self.log.end_lease(self.leases.pop(rng.randrange(len(self.leases)))[0])

    # --- one step over the channel

    def step(self, rng, writes=()):
        """Send what is pending to all ranks, each with a fault now and then; replace those that fail. At least one rank
        is spared, whose rows the new ones get."""
        first, entries = self.log.pending()
        for entry in entries:
            self.counts["evicted"] += type(entry).__name__ == "Evict"
        self.number += 1
        self.counts["steps"] += 1
        wire = encode(Message(self.number, first, entries, list(writes)))
        digest, spared = self.log.digest(), rng.randrange(len(self.ranks))
        failed = []
        for index, rank in enumerate(self.ranks):
            fault = rng.choice(FAULTS) if index != spared and rng.random() < self.faults else None
            if fault is not None:
                self.counts[fault] += 1
            if not deliver(rng, rank, wire, fault, self.sent, digest, self.log.snapshot()):
                failed.append(index)
        for index in failed:
            self.ranks[index] = self._refill(self.ranks[spared], wire)
            self.counts["replaced"] += 1
        self.sent.append(wire)
        self.log.acknowledge()
        self.check()

    def _refill(self, survivor, wire):
        """A rank that joins: the tables by a snapshot, the rows in use from a survivor, poison elsewhere."""
        snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(self.log.snapshot()), type=Snapshot)
        rank = FakeRank(self.num_slots, Replica.restore(self.num_slots, snapshot))
        used = np.isin(self._states(), (LIVE, SCRATCH))
        rank.pool[:, used] = survivor.pool[:, used]
        rank.joined = rank.done = self.number
        assert rank.handle(wire) == self.log.digest()
        return rank

    # --- what must hold

    def check(self):
        for rank in self.ranks:
            for seq, sequence in self.sequences.items():
                slots, tree = self.log.prefix_slots(seq), self.log.tree_slots(seq)
                assert rank.replica.prefix_slots(seq).tolist() == slots.tolist()
                assert rank.replica.tree_slots(seq).tolist() == tree.tolist()
                assert (rank.pool[:, slots] == rows(sequence.tags)).all(), f"a wrong row in sequence {seq}"
                tags = sequence.tree[2] if sequence.tree else []
                assert (rank.pool[:, tree] == rows(tags)).all(), f"a wrong row in the tree of sequence {seq}"
            for ranks, late in self.read_late:
                for seq, slots, kept, tags in late:
                    assert slots.tolist() == kept, "a table was changed while it could be read"
                    if seq in self.sequences and rank in ranks:
                        assert (rank.pool[:, slots] == rows(tags)).all(), "a row was overwritten while it could be read"
            for _, slots, tags in self._nodes():
                assert (rank.pool[:, slots] == rows(tags)).all(), "a wrong row in the cache"
        for lease, slots in self.leases:
            if lease.seq in self.sequences:
                assert self.log.intact(lease), "a leased row has gone"
                assert self.log.prefix_slots(lease.seq)[: len(slots)].tolist() == slots, "a leased row has moved"
        tables = [(seq, self.log.prefix_slots(seq), list(s.tags)) for seq, s in self.sequences.items()]
        self.read_late.append((list(self.ranks), [(seq, view, view.tolist(), tags) for seq, view, tags in tables]))
        self.check_states()

    def check_states(self):
        """Every slot in one state; readers, positions and counters are those of a recount; the digest is its
        definition."""
        slots = self.log._tables.slots
        model = Model(self.num_slots)
        model.limit = slots.limit
        for seq in self.sequences:
            model.prefix[seq] = self.log.prefix_slots(seq).tolist()
            model.tree[seq] = self.log.tree_slots(seq).tolist()
        readers = np.zeros(self.num_slots, np.int32)
        for prefix in model.prefix.values():
            readers[prefix] += 1
            assert slots.positions[prefix].tolist() == list(range(len(prefix)))
        for node, node_slots, _ in self._nodes():
            assert slots.cached[node_slots].all(), "the tree names slots that the cache does not keep"
            assert (np.diff(readers[node_slots]) <= 0).all()
            readers[node_slots] += 1
            start = self._depth(node) - len(node_slots)
            model.cached |= {int(slot): start + i for i, slot in enumerate(node_slots)}
        model.quarantined = set(np.flatnonzero(slots.states == QUARANTINED).tolist())
        waiting = [batch for _, batch in self.log._quarantine._waiting] + self.log._quarantine._answered
        assert {int(slot) for batch in waiting for slot in batch} == model.quarantined, (
            "a source that nothing will free"
        )
        assert int(slots.cached.sum()) == len(model.cached)
        assert (slots.readers == readers).all(), "readers are not those of a recount"
        assert ((slots.states == LIVE) == (readers > 0)).all()
        assert self.log.digest() == model.digest(), "the digest is not that of the tables"
        stats = self.log.stats()
        kinds = ("free", "scratch", "live", "quarantined", "withheld")
        assert sum(stats[kind] for kind in kinds) == self.num_slots - 1
        assert stats["evictable"] == self._evictable(slots.limit), "not what could be evicted"
        held = self.log._job.windows if self.log._job else np.zeros(self.num_slots, np.bool_)
        handed_out = [int(s) for s in self._free_list()]
        assert len(set(handed_out)) == len(handed_out), "a slot is twice in the free list"
        free = set(np.flatnonzero(slots.states[: slots.limit] == FREE).tolist())
        assert set(handed_out) == free - set(np.flatnonzero(held).tolist()), "the free list is not what is free"

    def end(self):
        """Close everything, evict everything: all slots are free, and the tables are those of a new pool."""
        rng = random.Random(0)
        for seq in list(self.sequences):
            self.log.close(seq)
            del self.sequences[seq]
        while self.leases:
            self.end_lease(rng)
        self.log.resize(self.num_slots)
        for _ in range(3):
            self.step(rng)
        self.log.make_room(self.num_slots - 1)
        self.step(rng)
        assert self.log.stats()["free"] == self.num_slots - 1, "slots are missing after the end"
        assert self.log.digest() == KvLog(self.num_slots).digest()

    # --- by brute force

    def _any(self, rng):
        return rng.choice(sorted(self.sequences))

    def _tokens(self, rng, n):
        return [rng.randrange(self.vocabulary) if rng.random() < 0.3 else 0 for _ in range(n)]

    def _states(self):
        return self.log.slot_map()[0]

    def _extents(self, seq):
        return extents(self.log.prefix_slots(seq))

    def _chain_extents(self):
        return sum(extents(chain) for _, chain in self.log._chains())

    def _nodes(self, node=None, before=0):
        """(node, slots, tags) of the radix tree, parents first."""
        node = node or self.log._cache._root
        for child in node.children.values():
            tags = []
            for token in child.tokens.tolist():
                tags.append(tag(tags[-1] if tags else before, token))
            yield child, child.slots, tags
            yield from self._nodes(child, tags[-1])

    def _depth(self, node):
        return 0 if node is None else len(node.slots) + self._depth(node.parent)

    def _cached(self, tokens):
        """Length of the longest cached prefix, from the set of all cached prefixes' tags."""
        known = {tag for _, _, tags in self._nodes() for tag in tags}
        at = length = 0
        for token in tokens:
            at = tag(at, token)
            if at not in known:
                break
            length += 1
        return length

    def _evictable(self, limit):
        """Slots below the limit that neither a sequence reads nor one further down the tree that a sequence reads."""
        read = {int(slot) for seq in self.sequences for slot in self.log.prefix_slots(seq)}
        kept = set()
        for node, slots, _ in self._nodes():
            last = max((i for i, slot in enumerate(slots) if int(slot) in read), default=-1)
            while node is not None and last >= 0:
                kept |= set(node.slots[: last + 1].tolist())
                node = node.parent
                last = len(node.slots) - 1 if node else -1
        return sum(slot < limit and slot not in kept for _, slots, _ in self._nodes() for slot in slots.tolist())

    def _room(self, seq):
        limit = self.log._tables.slots.limit
        own = sum(slot < limit for slot in self.log.tree_slots(seq))
        return len(self.log._tables.slots.free()) + own + self._evictable(limit)

    def _refused(self, seq, n, call):
        """PoolFull says what is needed and what there is, and changes nothing."""
        room, digest, entries = self._room(seq), self.log.digest(), self.log.stats()["entries"]
        with pytest.raises(PoolFull, match=f"^{n} slots needed, ") as full:
            call(seq, n)
        assert full.value.needed == n and full.value.free + full.value.evictable == room
        assert (self.log.digest(), self.log.stats()["entries"]) == (digest, entries)

    def _free_list(self):
        free = self.log._free
        return [*free._ascending[free._next :], *free._stack[: free._stacked]]


OPERATIONS = {
    "open": 5, "append": 5, "draft": 8, "commit": 8, "fork": 2, "cache": 3, "close": 5, "defrag": 8, "resize": 2,
    "lease": 4, "end_lease": 2, "defrag_until_done": 1, "fill_up": 1, "overfill": 1, "bad_path": 1,
}  # fmt: skip


def random_world(seed, operations, **options):
    """A world after so many random operations, ended; everything is checked after each."""
    rng, world = random.Random(seed), World(**options)
    names = rng.choices(list(OPERATIONS), list(OPERATIONS.values()), k=operations)
    for name in names:
        getattr(world, name)(rng)
        world.check_states()
    world.end()
    return world
