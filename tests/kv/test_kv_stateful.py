"""Random sequences of calls, two replicas and the brute-force model side by side, compared after every call."""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_model import Model, random_parents, random_path

from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.log import Entry, KvLog, Replica

MAX_SEQUENCES = 6
PICK = st.integers(0, 2**16)
SEED = st.integers(0, 2**32)


class LogMachine(RuleBasedStateMachine):
    """`prompt` gets each entry at once, `late` gets batches, some of them again."""

    def __init__(self):
        super().__init__()
        self.num_slots = 160
        self.log = KvLog(self.num_slots, MAX_SEQUENCES)
        self.model = Model(self.num_slots)
        self.prompt, self.late = Replica(self.num_slots), Replica(self.num_slots)
        self.entries, self.digests = [], [self.log.digest()]
        self.late_has = 0
        self.digest_of = {self.model.structure(): self.log.digest()}
        self.views = []

    def pick(self, number):
        return sorted(self.model.prefix)[number % len(self.model.prefix)]

    @precondition(lambda self: len(self.model.prefix) < MAX_SEQUENCES)
    @rule()
    def open(self):
        self.model.open(self.log.open())

    @precondition(lambda self: self.model.prefix)
    @rule(number=PICK, n=st.integers(1, 40))
    def append(self, number, n):
        seq = self.pick(number)
        if n <= self.model.room(seq):
            self.model.append(seq, self.log.append(seq, n).tolist())

    @precondition(lambda self: self.model.prefix)
    @rule(number=PICK, n=st.integers(1, 33))
    def draft(self, number, n):
        seq = self.pick(number)
        if n <= self.model.room(seq):
            self.model.draft(seq, self.log.draft(seq, n).tolist())

    @precondition(lambda self: any(self.model.tree.values()))
    @rule(number=PICK, seed=SEED, root_only=st.booleans())
    def commit(self, number, seed, root_only):
        drafted = sorted(seq for seq, tree in self.model.tree.items() if tree)
        seq, rng = drafted[number % len(drafted)], random.Random(seed)
        path = [0] if root_only else random_path(rng, random_parents(rng, len(self.model.tree[seq])))
        self.log.commit(seq, path)
        self.model.commit(seq, path)

    @precondition(lambda self: 0 < len(self.model.prefix) < MAX_SEQUENCES)
    @rule(number=PICK)
    def fork(self, number):
        seq = self.pick(number)
        self.model.fork(seq, self.log.fork(seq))

    @precondition(lambda self: self.model.prefix)
    @rule(number=PICK)
    def close(self, number):
        seq = self.pick(number)
        self.log.close(seq)
        self.model.close(seq)

    @precondition(lambda self: self.model.prefix)
    @rule(number=PICK, excess=st.integers(1, 40), draft=st.booleans())
    def overfill(self, number, excess, draft):
        """PoolFull names both numbers and changes nothing (the next comparison sees any change)."""
        seq = self.pick(number)
        room = self.model.room(seq)
        with pytest.raises(PoolFull, match=rf"\b{room + excess} slots needed, {room} are free"):
            (self.log.draft if draft else self.log.append)(seq, room + excess)

    @precondition(lambda self: self.model.prefix)
    @rule(number=PICK)
    def fill_up(self, number):
        """Everything counted free can be had."""
        seq = self.pick(number)
        if self.model.room(seq):
            self.model.draft(seq, self.log.draft(seq, self.model.room(seq)).tolist())

    @precondition(lambda self: any(self.model.tree.values()))
    @rule(number=PICK, bad=st.sampled_from([[], [1], [0, 0], [0, 2, 1], [0, -1], [0, 10**6], [0, 2**32 + 1], [0.0]]))
    def bad_path(self, number, bad):
        drafted = sorted(seq for seq, tree in self.model.tree.items() if tree)
        with pytest.raises(ArgumentError, match="path"):
            self.log.commit(drafted[number % len(drafted)], bad)

    @rule(back=st.integers(0, 12), ahead=st.integers(0, 12))
    def deliver_late(self, back, ahead):
        first = max(1, self.late_has + 1 - back)
        last = min(len(self.entries), self.late_has + ahead)
        assert self.late.apply(first, self.entries[first - 1 : last]) == self.digests[max(last, first - 1)]
        self.late_has = max(self.late_has, last)

    @invariant()
    def everything_agrees(self):
        first, new = self.log.pending()
        assert first == len(self.entries) + 1 and len(new) <= 1
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=list[Entry])
        assert self.prompt.apply(first, wire) == self.log.digest() == self.prompt.digest()
        self.entries += wire
        self.digests += [self.log.digest()] * len(wire)

        stats = self.log.stats()
        assert stats["entries"] == len(self.entries)
        self.model.check_states(stats)
        self.model.check_tables(self.log)
        self.model.check_tables(self.prompt)
        self.model.check_sharing()
        assert self.log.digest() == self.model.digest()
        assert self.digest_of.setdefault(self.model.structure(), self.log.digest()) == self.log.digest()
        assert len(set(self.digest_of.values())) == len(self.digest_of)

        # Tables already handed to a step stay as they were (SGLang#18803: a table row recycled under its reader).
        for view, slots in self.views:
            assert view.tolist() == slots
        self.views = [(self.log.prefix_slots(seq), list(slots)) for seq, slots in self.model.prefix.items()]

    def teardown(self):
        self.late.apply(self.late_has + 1, self.entries[self.late_has :])
        assert self.late.digest() == self.log.digest()
        for seq in list(self.model.prefix):
            self.log.close(seq)
        assert self.log.stats()["free"] == self.num_slots - 1
        assert self.log.digest() == KvLog(self.num_slots).digest()


TestLog = LogMachine.TestCase
TestLog.settings = settings(
    max_examples=100, stateful_step_count=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
