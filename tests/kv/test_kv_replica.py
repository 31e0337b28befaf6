"""Replicas fed with repeated, damaged and contradictory logs: the same state, or a fence; never a guess."""

import random

import pytest
from kv_model import int32, random_log

from tpverify.kv import replica as kv_replica
from tpverify.kv.log import Append, Close, Commit, Draft, Fenced, Fork, Open, Replica


def test_repeats_are_answered_from_memory():
    log, entries, digests, model = random_log(seed=2, rounds=200)
    replica = Replica(200)
    assert replica.apply(1, entries[:120]) == digests[120]
    assert replica.apply(50, entries[49:70]) == digests[70]
    assert replica.apply(100, entries[99:]) == log.digest()
    assert replica.apply(1, entries) == log.digest()
    assert replica.apply(201, []) == log.digest() and replica.apply(1, []) == digests[0]
    model.check_tables(replica)


@pytest.mark.parametrize("fault", ["dropped", "duplicated", "altered", "reordered"])
@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_log_never_passes(seed, fault):
    """LMCache#1467, SGLang#10214, #26923: ranks that saw different events went on and hung or asserted much later.

    The log comes one entry a message and is damaged at a random place.
    """
    log, entries, digests, _ = random_log(seed, rounds=60)
    rng = random.Random(seed)
    at = rng.randrange(len(entries) - 1)
    messages = list(enumerate(entries, 1))
    if fault == "dropped":
        del messages[at]
    elif fault == "duplicated":  # the same change once more, under the next number
        messages.insert(at + 1, (messages[at][0] + 1, entries[at]))
    elif fault == "altered":
        other = next(entry for entry in rng.sample(entries, len(entries)) if entry != entries[at])
        messages[at] = (at + 1, other)
    else:
        messages[at], messages[at + 1] = (at + 1, entries[at + 1]), (at + 2, entries[at])
    replica, noticed = Replica(200), None
    for number, entry in messages:
        try:
            if replica.apply(number, [entry]) != digests[number]:
                noticed = "digest"
        except Fenced:
            noticed = "fence"
        if noticed:
            break
    assert noticed is not None
    assert number <= at + 2, "noticed at the entry itself or at the next one"
    if fault == "dropped":
        assert noticed == "fence"


@pytest.mark.parametrize(
    "entry",
    [
        Open(0),
        Append(5, int32(9)),
        Append(0, int32()),
        Append(0, int32(3)),
        Append(0, int32(0, 9)),
        Append(0, int32(9, 8)),
        Append(0, int32(9, 9)),
        Append(0, int32(9, 32)),
        Append(0, int32(-1, 9)),
        Append(0, b"\x09\x00\x00"),
        Draft(1, int32(1)),
        Draft(1, int32(5, 6)),
        Commit(0, int32(0, 4)),
        Commit(0, int32(1)),
        Commit(0, int32(0, 2, 1)),
        Commit(1, int32(0)),
        Fork(9, 10),
        Fork(0, 1),
        Close(9),
    ],
    ids=repr,
)
def test_an_entry_that_does_not_fit_fences_for_good(entry):
    """sequences 0 (slots 1 2 3, tree 4 5 6 7) and 1 (empty); 32 slots. A refused entry changes no table."""
    replica = Replica(32)
    replica.apply(1, [Open(0), Open(1), Append(0, int32(1, 2, 3)), Draft(0, int32(4, 5, 6, 7))])
    tables = replica._tables
    before = tables.digest(), tables.slots.states.tolist(), tables[0].prefix.tolist(), tables[0].tree.tolist()
    with pytest.raises(Fenced, match="entry 5 does not fit the tables"):
        replica.apply(5, [entry])
    after = tables.digest(), tables.slots.states.tolist(), tables[0].prefix.tolist(), tables[0].tree.tolist()
    assert after == before
    for call in (
        lambda: replica.apply(5, [Open(2)]),
        lambda: replica.apply(1, [Open(0)]),
        lambda: replica.length(0),
        lambda: replica.prefix_slots(0),
        lambda: replica.tree_slots(0),
        lambda: replica.digest(),
    ):
        with pytest.raises(Fenced, match="entry 5 does not fit"):
            call()


@pytest.mark.parametrize(
    ("first", "entries", "cause"),
    [
        (4, [], "entry 3 is missing: the log goes on with entry 4"),
        (4, [Open(2)], "entry 3 is missing"),
        (2, [Open(7)], "entry 2 was repeated with another body"),
        (2, [Open(2**61)], "entry 2 was repeated with another body"),  # 1, to Python's hash
        (0, [Open(0)], "entry 0 was repeated with another body"),
        (-3, [], "entry -4 is not among the last 4096 of 2 applied"),
    ],
)
def test_gaps_and_contradictions_fence(first, entries, cause):
    replica = Replica(32)
    replica.apply(1, [Open(0), Open(1)])
    with pytest.raises(Fenced, match=cause):
        replica.apply(first, entries)
    with pytest.raises(Fenced, match=cause):
        replica.digest()


def test_memory_of_answers_is_bounded(monkeypatch):
    monkeypatch.setattr(kv_replica, "ANSWERS_KEPT", 8)
    log, entries, digests, _ = random_log(seed=3, rounds=40)
    replica = Replica(200)
    replica.apply(1, entries)
    assert len(replica._answers) == 8
    assert replica.apply(33, entries[32:34]) == digests[34]
    with pytest.raises(Fenced, match="entry 32 is not among the last 8 of 40 applied"):
        replica.apply(32, entries[31:34])
