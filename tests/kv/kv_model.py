"""An independent model of the tables: dicts, lists and sets, everything by brute force; random trees and logs."""

import itertools
import random

import numpy as np

from tpverify.kv.digest import mix64
from tpverify.kv.log import KvLog


class Model:
    """What the log must hold. It is told which slots were handed out and checks that they could be."""

    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.prefix = {}
        self.tree = {}
        self.cached = {}  # slot -> position
        self.quarantined = set()
        self.limit = num_slots
        self.slot_keys, self.position_keys = (
            [int(key) for key in np.random.PCG64(stream).random_raw(num_slots)] for stream in (1, 2)
        )

    def free(self):
        used = set(itertools.chain(*self.prefix.values(), *self.tree.values()))
        return set(range(1, self.num_slots)) - used

    def room(self, seq):
        """Slots that an append or a draft can get: the free ones, and those of the tree that it drops."""
        return len(self.free()) + len(self.tree[seq])

    def open(self, seq):
        assert seq not in self.prefix
        self.prefix[seq], self.tree[seq] = [], []

    def append(self, seq, slots):
        self.tree[seq] = []
        self._check_new(slots)
        self.prefix[seq] = self.prefix[seq] + slots

    def draft(self, seq, slots):
        self.tree[seq] = []
        self._check_new(slots)
        self.tree[seq] = slots

    def commit(self, seq, path):
        for node in path:
            self.prefix[seq] = self.prefix[seq] + [self.tree[seq][node]]
        self.tree[seq] = []

    def fork(self, seq, new):
        self.open(new)
        self.prefix[new] = list(self.prefix[seq])

    def close(self, seq):
        del self.prefix[seq], self.tree[seq]

    def _check_new(self, slots):
        assert len(set(slots)) == len(slots) and set(slots) <= self.free()

    def structure(self):
        """All that the digest stands for, hashable."""
        return tuple(sorted((seq, tuple(self.prefix[seq]), tuple(self.tree[seq])) for seq in self.prefix))

    def digest(self):
        """The digest by its definition, from nothing but the present tables, in Python integers."""
        total = 0
        for seq, prefix, tree in self.structure():
            word = mix64((mix64(seq) + self._key_sum(prefix)) % 2**64)
            word = mix64((word + self._key_sum(tree)) % 2**64)
            total += mix64(word ^ len(prefix) ^ len(tree) * 2**32)
        pool = mix64((self.limit + sum(self._key(slot, at) for slot, at in self.cached.items())) % 2**64)
        total += mix64((pool + sum(self._key(slot, 0) for slot in self.quarantined)) % 2**64)
        return f"{total % 2**64:016x}"

    def _key_sum(self, slots):
        return sum(self._key(slot, i) for i, slot in enumerate(slots))

    def _key(self, slot, position):
        return self.slot_keys[slot] * self.position_keys[position]

    def check_tables(self, tables):
        """A KvLog's or a Replica's tables are this model's."""
        for seq, slots in self.prefix.items():
            assert tables.length(seq) == len(slots)
            assert tables.prefix_slots(seq).tolist() == slots
            assert tables.tree_slots(seq).tolist() == self.tree[seq]

    def check_states(self, stats):
        """Every slot is in one state, the states add up, and the counters are those of a recount."""
        readers = {}
        for slots in self.prefix.values():
            for slot in slots:
                readers[slot] = readers.get(slot, 0) + 1
        scratch = [slot for slots in self.tree.values() for slot in slots]
        assert len(set(scratch)) == len(scratch) and not set(scratch) & set(readers) and 0 not in readers
        assert stats["free"] + stats["scratch"] + stats["live"] == self.num_slots - 1
        assert (stats["free"], stats["scratch"], stats["live"]) == (len(self.free()), len(scratch), len(readers))
        assert stats["shared"] == sum(count > 1 for count in readers.values())
        assert stats["sequences"] == len(self.prefix)

    def check_sharing(self):
        """Two sequences hold the same slot only at the same position of a common prefix, which only a fork makes."""
        for a, b in itertools.combinations(self.prefix.values(), 2):
            common = 0
            while common < min(len(a), len(b)) and a[common] == b[common]:
                common += 1
            assert not set(a[common:]) & set(b) and not set(b[common:]) & set(a)


def random_parents(rng: random.Random, n):
    """Parents of a random tree of n nodes; bushy, deep or in between."""
    reach = rng.choice([1, 2, 5, n])
    return [-1] + [rng.randrange(max(0, i - reach), i) for i in range(1, n)]


def random_path(rng: random.Random, parents):
    """Node indices from the root to a random node, the root alone included."""
    node, path = rng.randrange(len(parents)), []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]


def int32(*values):
    return np.array(values, "<i4").tobytes()


def random_log(seed, rounds, num_slots=200):
    """A log run at random. Returns it, its entries, its digest after each (0 first) and the model."""
    rng, log, model = random.Random(seed), KvLog(num_slots), Model(num_slots)
    digests = [log.digest()]
    while len(digests) <= rounds:
        seq = rng.choice(sorted(model.prefix) or [None])
        kind = rng.choice(["open", "append", "draft", "commit", "commit", "fork", "close"])
        if seq is None or (kind == "open" and len(model.prefix) < 5):
            model.open(log.open())
        elif kind == "append" and model.room(seq) >= 9:
            model.append(seq, log.append(seq, rng.randint(1, 9)).tolist())
        elif kind == "draft" and model.room(seq) >= 17:
            model.draft(seq, log.draft(seq, rng.randint(1, 17)).tolist())
        elif kind == "commit" and model.tree[seq]:
            path = random_path(rng, random_parents(rng, len(model.tree[seq])))
            log.commit(seq, path)
            model.commit(seq, path)
        elif kind == "fork" and len(model.prefix) < 5:
            model.fork(seq, log.fork(seq))
        elif kind == "close" and (len(model.prefix) > 2 or rng.random() < 0.1):
            log.close(seq)
            model.close(seq)
        else:
            continue
        digests.append(log.digest())
    first, entries = log.pending()
    assert (first, len(entries)) == (1, rounds)
    return log, entries, digests, model
