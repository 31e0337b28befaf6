"""Slot transitions refuse the wrong state; the free list hands out each slot once, ascending, in runs where it can."""

import random

import numpy as np
import pytest

from tpverify.errors import ArgumentError
from tpverify.kv.slots import FREE, LIVE, NO_SLOTS, SCRATCH, SINK, FreeSlots, SlotStates


def slots(*values):
    return np.array(values, np.int32)


def test_life_of_a_slot():
    pool = SlotStates(8)
    pool.claim(slots(1, 2, 3), SCRATCH)
    pool.claim(slots(5), LIVE)
    pool.settle(slots(1, 3), slots(2))
    assert pool.states.tolist() == [SINK, LIVE, FREE, LIVE, FREE, LIVE, FREE, FREE]
    pool.share(slots(1, 5))
    assert pool.release(slots(1, 3, 5)).tolist() == [3]
    assert pool.release(slots(1, 5)).tolist() == [1, 5]
    assert pool.states.tolist() == [SINK] + [FREE] * 7 and not pool.readers.any()


@pytest.mark.parametrize(
    "transition",
    [
        lambda pool: pool.settle(NO_SLOTS, slots(6)),
        lambda pool: pool.settle(NO_SLOTS, slots(1)),
        lambda pool: pool.settle(slots(6), NO_SLOTS),
        lambda pool: pool.release(slots(6)),
        lambda pool: pool.release(slots(1, 3)),
        lambda pool: pool.release(slots(0)),
        lambda pool: pool.share(slots(3)),
        lambda pool: pool.claim(slots(3), LIVE),
        lambda pool: pool.claim(slots(0), SCRATCH),
    ],
    ids=[
        "scratch freed twice",
        "live freed as scratch",
        "free accepted",
        "live freed twice",
        "scratch released",
        "sink released",
        "scratch shared",
        "scratch claimed",
        "sink claimed",
    ],
)
def test_a_transition_from_the_wrong_state_raises(transition):
    """sglang-jax#982: a slot freed by two paths must be noticed at the second, not when it is handed out twice."""
    pool = SlotStates(8)
    pool.claim(slots(1, 2), LIVE)
    pool.claim(slots(3, 4), SCRATCH)
    before = pool.states.tolist(), pool.readers.tolist()
    with pytest.raises(AssertionError):
        transition(pool)
    assert (pool.states.tolist(), pool.readers.tolist()) == before


@pytest.mark.parametrize("bad", [(), (0, 1), (1, 8), (-1, 1), (5, 4), (5, 5), (1, 5), (3, 5)])
def test_slots_from_a_message_are_checked(bad):
    pool = SlotStates(8)
    pool.claim(slots(1), LIVE)
    pool.claim(slots(3, 4), SCRATCH)
    with pytest.raises(ArgumentError, match="slots"):
        pool.check_free(slots(*bad), own=slots(4))
    pool.check_free(slots(2, 4, 5), own=slots(4))


def test_a_fresh_pool_hands_out_one_run():
    free = FreeSlots(100_000)
    assert free.take_recent(33).tolist() == list(range(1, 34))
    assert free.take_run(99_966).tolist() == list(range(34, 100_000))
    assert free.count == 0 and free.take_run(0).size == 0


def test_trees_reuse_their_slots_and_leave_the_rest_in_one_run():
    free = FreeSlots(1000)
    for _ in range(50):
        tree = free.take_recent(33)
        assert tree[-1] <= 33
        free.give(tree[::-1])
    assert free.take_run(900).tolist() == list(range(34, 934))


def test_slots_given_back_in_any_order_come_out_ascending():
    free = FreeSlots(9)
    free.take_run(8)
    for slot in (7, 2, 8, 1, 6):
        free.give(slots(slot))
    assert free.count == 5
    assert free.take_recent(2).tolist() == [1, 6]
    assert free.take_run(2).tolist() == [2, 7]
    free.give(slots(5))
    assert free.take_recent(2).tolist() == [5, 8]


def test_every_slot_is_out_at_most_once():
    """Against a set, for 3000 random takes and gives of a pool that is often full."""
    rng, free, out = random.Random(0), FreeSlots(300), []
    for _ in range(3000):
        if rng.random() < 0.5 and free.count:
            take = rng.choice([free.take_run, free.take_recent])
            taken = take(rng.randint(1, min(free.count, 60))).tolist()
            assert taken == sorted(taken) and not set(taken) & set(out) and 0 not in taken
            out += taken
        elif out:
            rng.shuffle(out)
            n = rng.randint(1, len(out))
            free.give(slots(*out[:n]))
            del out[:n]
        assert free.count + len(out) == 299
