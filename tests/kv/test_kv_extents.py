"""Runs are ascending and consecutive; what travels as runs comes back as it was."""

import random

import numpy as np
import pytest

from tpverify.errors import ArgumentError
from tpverify.kv import extents
from tpverify.kv.pacer import Pacer


def slots(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("values", "count"),
    [((), 0), ((7,), 1), ((8, 9), 1), ((9, 8), 2), ((8, 10), 2), ((3, 4, 5, 9, 10, 2), 3), ((5, 5), 2)],
)
def test_extents_of_hand_checked_tables(values, count):
    """vllm-ascend#14040: [9, 8] was taken for a run."""
    assert extents.count(slots(*values)) == count
    assert extents.counts([slots(*values), slots(), slots(*values)]) == [count, 0, count]


def test_columns_come_back_as_they_were():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(0, 30)
        first = [rng.randint(1, 40)]
        for _ in range(n):
            first.append(first[-1] + 1 if rng.random() < 0.7 else rng.randint(1, 40))
        second = [value + rng.choice([0, 0, 5]) for value in first]
        packed = extents.pack(slots(*first), slots(*second))
        assert [column.tolist() for column in extents.unpack("rows", packed, 2, 100)] == [first, second]
        assert len(packed) == 12 * (
            1 + sum(b - a != 1 or d - c != 1 for a, b, c, d in zip(first, first[1:], second, second[1:], strict=False))
        )


def test_a_run_costs_the_same_whatever_its_length():
    assert len(extents.pack(np.arange(1, 100_001, dtype=np.int32))) == 8


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((5,), "runs of 2 int32"), ((5, 0), "at least 1"), ((5, -1), "at least 1"), ((5, 6, 1, 5), "at most 10 slots")],
)
def test_runs_that_cannot_be(numbers, expected):
    with pytest.raises(ArgumentError, match=f"rows: expected .*{expected}"):
        extents.unpack("rows", slots(*numbers).tobytes(), 1, 10)


def test_defrag_by_itself_takes_its_share_and_waits_longer_when_idle():
    pacer, spent, calls = Pacer(share=0.02, first_cost_s=0.005), 0.0, []
    for step in range(20_000):
        pacer.step(0.010)
        if pacer.due():
            moves = 1000 if step < 10_000 else 0
            pacer.ran(0.004, moves, done=not moves)
            spent += 0.004
            calls.append(step)
    assert 0.01 < spent / 200 <= 0.02
    busy, idle = [sum(low <= step < low + 10_000 for step in calls) for low in (0, 10_000)]
    assert 400 <= busy <= 500 and idle < 20
