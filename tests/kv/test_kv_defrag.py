"""Plans, waves, shrinking, leases by hand-checked cases; kv_world.py checks them at random."""

import random

import numpy as np
import pytest

from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.log import Fenced, KvLog, Move, Replica
from tpverify.kv.slots import FREE


def interleaved(num_slots, sequences, rows, seed=0):
    """Sequences of `rows` rows each, one row at a time in random turns; nothing pending."""
    rng, log = random.Random(seed), KvLog(num_slots)
    seqs = [log.open() for _ in range(sequences)]
    turns = [seq for seq in seqs for _ in range(rows)]
    rng.shuffle(turns)
    for seq in turns:
        log.append(seq, 1)
    return log, seqs


def step(log, replica=None):
    """One step that all ranks have answered."""
    first, entries = log.pending()
    if replica is not None:
        assert replica.apply(first, entries) == log.digest()
    log.acknowledge()
    return entries


def settle(log, most=10**6, **how):
    """Defrag until nothing moves. Returns rows moved and calls that moved any."""
    moves = waves = 0
    while not (moved := log.defrag(most, **how)).done:
        assert moved.moves <= most
        moves, waves = moves + moved.moves, waves + bool(moved.moves)
        step(log)
    return moves, waves


def test_scattered_rows_come_together_and_stay():
    log, seqs = interleaved(1000, sequences=7, rows=100)
    assert min(log.extents().values()) > 50
    moves, _ = settle(log)
    assert set(log.extents().values()) == {1} and moves <= 1.4 * 700
    assert settle(log) == (0, 0), "a second plan on a static pool moves nothing"


@pytest.mark.parametrize("most", [1, 37, 250])
@pytest.mark.parametrize("load", [0.5, 0.7, 0.9])
def test_any_budget_ends_in_few_extents(most, load):
    log, seqs = interleaved(600, sequences=6, rows=int(load * 100))
    moves, _ = settle(log, most)
    assert max(log.extents().values()) <= 4
    assert moves <= (1.4 if load <= 0.7 else 2.0) * 6 * int(load * 100)


def test_a_long_extent_stays_and_the_rest_joins_it():
    log = KvLog(400)
    seq, other = log.open(), log.open()
    log.append(seq, 100)
    log.append(other, 3)
    for _ in range(5):
        log.append(seq, 1)
        log.append(other, 1)
    moves, _ = settle(log)
    assert log.prefix_slots(seq).tolist()[:100] == list(range(1, 101)), "a run of 100 rows stays"
    assert set(log.extents().values()) == {1} and moves < 30


def test_with_a_goal_of_four_only_the_scattered_tail_moves():
    log = KvLog(4000)
    seq, other = log.open(), log.open()
    for _ in range(3):
        log.append(seq, 500)
        log.append(other, 500)
    for _ in range(20):
        log.append(seq, 1)
        log.append(other, 1)
    moves, _ = settle(log, goal=4, threshold=16)
    assert moves <= 60 and max(log.extents().values()) <= 4
    for _ in range(10):
        log.append(seq, 1)
        log.append(other, 1)
    assert settle(log, goal=4, threshold=16) == (0, 0), "below the threshold nothing moves: no thrash"


def test_sources_are_reused_only_after_a_later_step():
    """H2#2068 and others: space that a compactor had just left was handed out at once."""
    log, seqs = interleaved(64, sequences=2, rows=10)
    old = {int(slot) for seq in seqs for slot in log.prefix_slots(seq)}
    step(log)
    moved = log.defrag(1000)
    left = old - {int(slot) for seq in seqs for slot in log.prefix_slots(seq)}
    assert len(left) == moved.moves == log.stats()["quarantined"] > 0
    assert log.defrag(1000).moves == 0 and not log.defrag(1000).done, "one wave at a time"
    for _ in range(2):
        free = log.stats()["free"]
        taken = log.append(log.open(), free).tolist()
        assert not set(taken) & left
        log.close(max(log.extents()))
        step(log)
    assert log.stats()["quarantined"] == 0
    assert set(log.append(log.open(), log.stats()["free"]).tolist()) >= left


def test_an_acknowledgement_counts_for_what_was_sent():
    log, _ = interleaved(64, sequences=2, rows=10)
    step(log)
    log.defrag(1000)
    log.acknowledge()
    log.acknowledge()
    log.acknowledge()
    assert log.stats()["quarantined"] > 0, "the move has not been sent"


def test_a_shared_row_moves_once_for_all_its_readers():
    log, replica = KvLog(200), Replica(200)
    stem, other = log.open(), log.open()
    for _ in range(20):
        log.append(stem, 1)
        log.append(other, 1)
    log.cache(stem, range(20))
    readers = [log.open([*range(20), 99]) for _ in range(5)] + [log.fork(stem)]
    log.close(stem)
    step(log, replica)
    moves = 0
    while not (moved := log.defrag(1000)).done:
        moves += moved.moves
        step(log, replica)
    assert moves <= 60 and {tuple(log.prefix_slots(seq).tolist()) for seq in readers} == {
        tuple(replica.prefix_slots(seq).tolist()) for seq in readers
    }
    assert len({tuple(log.prefix_slots(seq).tolist()) for seq in readers}) == 1 and log.extents()[readers[0]] == 1
    assert log.prefix_slots(log.open([*range(20), 7])).tolist() == log.prefix_slots(readers[0]).tolist()


def test_a_pinned_row_never_moves_and_a_stale_lease_shows():
    log, seqs = interleaved(100, sequences=3, rows=10)
    lease = log.lease(seqs[0])
    before = lease.slots.tolist()
    settle(log)
    assert log.prefix_slots(seqs[0]).tolist() == before and log.intact(lease)
    log.close(seqs[0])
    log.append(log.open(), log.stats()["free"])
    assert not log.intact(lease)
    log.end_lease(lease)


def test_a_job_gives_way_to_whoever_needs_its_slots():
    log, seqs = interleaved(200, sequences=2, rows=60)
    step(log)
    assert log.defrag(5).moves == 5
    for _ in range(3):
        step(log)
    free = log.stats()["free"]
    assert len(log.append(log.open(), free)) == free and log.stats()["free"] == 0


def test_a_full_pool_has_nothing_to_plan_with():
    log, _ = interleaved(41, sequences=2, rows=20)
    assert log.stats()["free"] == 0 and settle(log) == (0, 0)


def test_the_top_is_emptied_with_as_many_moves_as_rows_lie_there():
    log, seqs = interleaved(101, sequences=4, rows=25)
    log.close(seqs[0])
    log.close(seqs[1])
    replica = Replica(101)
    step(log, replica)
    above = sum(int((log.prefix_slots(seq) >= 61).sum()) for seq in seqs[2:])
    moved = log.resize(61)
    assert moved.moves == above > 0 and not moved.done
    for _ in range(3):
        step(log, replica)
    assert log.resize(61).done and log.stats()["withheld"] == 40
    assert not (log.slot_map()[0][61:] != FREE).any()
    with pytest.raises(PoolFull):
        log.append(seqs[2], 11)
    assert log.resize(101).done and len(log.append(seqs[2], 50)) == 50
    step(log, replica)


def test_shrinking_evicts_before_it_refuses():
    log = KvLog(101)
    seq = log.open()
    log.append(seq, 40)
    log.close(seq, range(40))
    keeper = log.open()
    log.append(keeper, 30)
    with pytest.raises(PoolFull, match="30 slots are in use, 19 would be left"):
        log.resize(20)
    assert log.stats()["cached"] == 40
    log.resize(41)
    assert log.stats()["cached"] <= 10 and log.prefix_slots(keeper).size == 30
    with pytest.raises(ArgumentError, match="num_slots"):
        log.resize(102)


def test_moves_are_checked_before_they_are_applied():
    """Sequence 0 has slots 1 to 10. dst in use, outside, twice, among the sources; a source that holds no row."""
    for rows in (
        [[1, 5, 1]],
        [[1, 32, 1]],
        [[1, 20, 1], [2, 20, 1]],
        [[1, 2, 1]],
        [[15, 20, 1]],
        [[1, 20, 1], [1, 21, 1]],
    ):
        log, replica = KvLog(32), Replica(32)
        log.append(log.open(), 10)
        replica.apply(*log.pending())
        with pytest.raises(Fenced, match="entry 3 does not fit the tables"):
            replica.apply(3, [Move(np.array(rows, "<i4").tobytes())])


def test_a_repeated_move_is_not_copied_again():
    log, replica = KvLog(64), Replica(64)
    log.append(log.open(), 3)
    for _ in range(4):
        log.append(log.open(), 1)
        log.append(0, 1)
    log.defrag(100)
    first, entries = log.pending()
    replica.apply(first, entries)
    assert len(replica.take_moves()) == 1 and replica.take_moves() == []
    assert replica.apply(first, entries) == log.digest() and replica.take_moves() == []


def test_a_rank_that_joins_has_the_same_tables():
    log, _ = interleaved(200, sequences=5, rows=20)
    log.close(2, range(20))
    log.open([*range(10), 5])
    log.draft(1, 9)
    log.defrag(7)
    replica = Replica.restore(200, log.snapshot())
    assert replica.digest() == log.digest()
    assert replica.apply(*log.pending()) == log.digest(), "what the snapshot covers counts as applied"
    log.acknowledge()
    log.acknowledge()
    log.commit(1, [0, 4])
    assert replica.apply(*log.pending()) == log.digest()
    assert replica.tree_slots(1).size == 0 and replica.length(1) == 22
    with pytest.raises(Fenced, match="is missing"):
        replica.apply(10**6, [])


def test_the_slot_map_names_states_and_owners():
    log = KvLog(32)
    one, two = log.open(), log.open()
    log.append(one, 3)
    log.append(two, 2)
    log.draft(two, 4)
    log.close(one, [5, 6, 7])
    states, owners = log.slot_map()
    assert owners[1:10].tolist() == [-2, -2, -2, two, two, two, two, two, two]
    assert set(owners[10:].tolist()) == {-1} and states[0] == 3 and (states[10:] == FREE).all()
