"""Bugs of other engines, put into this one: the same random worlds that pass must then fail.

`pytest -s` prints the table: mutation, where it was seen, what noticed it.
"""

import numpy as np
import pytest
from kv_fake import FakeRank
from kv_world import random_world

from tpverify.kv import entries, extents, log, quarantine, radix, replica, slots, table
from tpverify.kv.slots import FREE, SlotStates

SEEDS = range(12)
OPTIONS = {"operations": 80, "faults": 0.1}


def reused_in_quarantine(patch):
    """SGLang 18803, H2's compactor: the sources of a move are free at once."""
    move = log.KvLog._move

    def at_once(self, src, dst):
        move(self, src, dst)
        self._quarantine = quarantine.Quarantine()
        self._record(log.Retire(extents.pack(np.sort(src))))

    patch.setattr(log.KvLog, "_move", at_once)


def second_batch_replaces_the_first(patch):
    """SGLang 39982: two batches of sources on one event, the later one forgot the earlier: slots lost."""

    def step(self, sent):
        leaving = self._answered[-1:]
        self._answered = [source for _, source in self._waiting][-1:]
        self._waiting = []
        return leaving

    patch.setattr(quarantine.Quarantine, "step", step)
    patch.setattr(quarantine.Quarantine, "__bool__", lambda self: False)


def one_layer_skipped(patch):
    """SGLang 26982: one pool of several was not moved."""

    def copy(self, src, dst):
        self.pool[:-1, dst] = self.pool[:-1, src]

    patch.setattr(FakeRank, "copy", copy)


def two_rows_swapped(patch):
    """SGLang 31218: rows permuted within a page, so that a page's checksum stayed the same."""

    def copy(self, src, dst):
        self.pool[:, dst] = self.pool[:, np.concatenate((src[:2][::-1], src[2:]))]

    patch.setattr(FakeRank, "copy", copy)


def reversed_run_taken_for_a_run(patch):
    """vllm-ascend 14040: two blocks in descending order were merged into one transfer."""

    def begins(*columns):
        breaks = np.zeros(columns[0].size, np.bool_)
        breaks[:1] = True
        for column in columns:
            breaks[1:] |= np.abs(np.diff(column)) != 1
        return breaks

    patch.setattr(extents, "begins", begins)


def stale_table_row(patch):
    """SGLang 18803, mini-sglang 142: one reader's table still names the old slots."""
    redirect = table.Sequence.redirect

    def but_for_the_last(self, positions, new):
        redirect(self, positions[:-1], new[:-1])

    patch.setattr(table.Sequence, "redirect", but_for_the_last)


def table_rewritten_under_its_reader(patch):
    """TensorRT-LLM 15546: a table was edited in place while a step still read it."""
    patch.setattr(table.Sequence, "redirect", lambda self, positions, new: self.buffer.put(positions, new))


def freed_twice(patch):
    """sglang-jax 982: one slot freed by two paths."""
    give = log.KvLog._give

    def twice(self, freed):
        give(self, freed)
        give(self, freed[:1])

    patch.setattr(log.KvLog, "_give", twice)


def counter_drifts(patch):
    """llama.cpp 14059: a moved row forgets how many read it."""
    move = SlotStates.move

    def forgetful(self, src, dst):
        move(self, src, dst)
        self.readers.put(dst, 1)

    patch.setattr(SlotStates, "move", forgetful)


def rejected_slots_leak(patch):
    """sglang-jax 1147: slots of a draft that was not accepted never came back."""
    commit = table.SequenceTables.commit
    patch.setattr(table.SequenceTables, "commit", lambda self, seq, path: commit(self, seq, path)[1:])


def split_during_a_move(patch):
    """SGLang 38480: of a node that has been split, only the half that was known before follows the move."""

    def move(self, src, dst):
        place = np.arange(self._states.states.size, dtype=np.int32)
        place.put(src, dst)
        for node in self._used:
            if not node.children:
                node.slots = place.take(node.slots)

    patch.setattr(radix.RadixCache, "move", move)


def evicted_while_in_use(patch):
    """mini-sglang 52: the walk that locks a path left out the node itself."""
    patch.setattr(radix.RadixCache, "_unread", lambda self, node: node.slots.size)


def cache_not_a_reader(patch):
    """mini-sglang 142: the cache names slots that are freed with the sequence that wrote them."""

    def retain(self, kept):
        self.slots.cached.put(kept, True)
        self._cached_sum += self._slot_hash.at(kept, self.slots.positions.take(kept))
        self._rehash_pool()
        return slots.NO_SLOTS

    patch.setattr(table.SequenceTables, "retain", retain)


def repeat_applied_again(patch):
    """A retry that is run twice: the second copy reads sources that others have overwritten."""
    apply = replica.Replica.apply

    def again(self, first, changes):
        digest = apply(self, first, changes)
        self._moves += [e.pairs(self._tables.num_slots) for e in changes if isinstance(e, entries.Move)]
        return digest

    patch.setattr(replica.Replica, "apply", again)


def digest_blind_to_moves(patch):
    """A digest that a move leaves as it was."""
    terms = table.SlotHash.terms
    patch.setattr(table.SlotHash, "terms", lambda self, s, positions: terms(self, np.zeros_like(s), positions))


def destination_in_use(patch):
    """vllm 50729: source and destination of a copy overlap."""
    patch.setattr(SlotStates, "check_free", lambda self, chosen, own: None)
    free = SlotStates.free
    patch.setattr(SlotStates, "free", lambda self: np.union1d(free(self), np.flatnonzero(self.states == 2)[-1:]))


def pin_ignored(patch):
    """SGLang 39982: moves went on under a closed gate."""
    patch.setattr(log.KvLog, "lease", lambda self, seq: log.Lease(seq, self.prefix_slots(seq), np.array([])))
    patch.setattr(log.KvLog, "end_lease", lambda self, lease: None)
    patch.setattr(log.KvLog, "intact", lambda self, lease: True)


def limit_ignored(patch):
    """Memory that was handed back is handed out."""
    resize = table.SequenceTables.resize

    def forgotten(self, limit):
        resize(self, limit)
        self.slots.free = lambda: np.flatnonzero(self.slots.states == FREE).astype(np.int32)
        return slots.NO_SLOTS

    patch.setattr(table.SequenceTables, "resize", forgotten)


MUTATIONS = [
    reused_in_quarantine,
    second_batch_replaces_the_first,
    one_layer_skipped,
    two_rows_swapped,
    reversed_run_taken_for_a_run,
    stale_table_row,
    table_rewritten_under_its_reader,
    freed_twice,
    counter_drifts,
    rejected_slots_leak,
    split_during_a_move,
    evicted_while_in_use,
    cache_not_a_reader,
    repeat_applied_again,
    digest_blind_to_moves,
    destination_in_use,
    pin_ignored,
    limit_ignored,
]


def test_the_worlds_pass_unchanged():
    for seed in SEEDS:
        random_world(seed, **OPTIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_bug_put_in_is_noticed(mutation, monkeypatch):
    mutation(monkeypatch)
    for seed in range(2 * len(SEEDS)):
        try:
            random_world(seed, **OPTIONS)
        except Exception as noticed:
            where = f"world {seed}"
            said = str(noticed).splitlines()[0] if str(noticed) else "an assertion"
            print(f"| {mutation.__name__.replace('_', ' ')} | {where} | {type(noticed).__name__}: {said[:90]} |")
            return
    pytest.fail(f"{mutation.__name__} passed in all worlds")
