"""The structural digest: equal for equal tables however they came about, different for any other mapping."""

import itertools
import random

import numpy as np
import pytest

from tpverify.kv.digest import MASK64, SlotHash, mix64
from tpverify.kv.log import Append, Close, Commit, Draft, Fork, Open, Replica

NUM_SLOTS = 64


def int32(*values):
    return np.array(values, "<i4").tobytes()


def digest_of(*entries):
    return Replica(NUM_SLOTS).apply(1, entries)


BASE = (Open(0), Open(1), Append(0, int32(5, 6, 7)), Append(1, int32(8)), Draft(1, int32(10, 11)))


@pytest.mark.parametrize(
    "entries",
    [
        (Open(1), Append(1, int32(8)), Draft(1, int32(10, 11)), Open(0), Append(0, int32(5, 6, 7))),
        (Open(0), Open(1), Append(0, int32(5)), Append(0, int32(6, 7)), Append(1, int32(8)), Draft(1, int32(10, 11))),
        (Open(0), Draft(0, int32(5, 6, 7)), Commit(0, int32(0, 1, 2)), Open(1), *BASE[3:]),
        (Open(0), Draft(0, int32(5, 6, 7, 9)), Commit(0, int32(0, 1, 2)), Open(1), *BASE[3:]),
        (*BASE[:4], Draft(1, int32(20, 30, 31)), BASE[4]),
        (*BASE, Fork(0, 2), Append(2, int32(33)), Close(2)),
        (Open(2), Append(2, int32(5, 6)), Fork(2, 0), Close(2), Append(0, int32(7)), Open(1), *BASE[3:]),
        (Open(0), Open(1), Draft(0, int32(5, 6)), Append(0, int32(5, 6, 7)), *BASE[3:]),
    ],
    ids=[
        "other order",
        "piecewise",
        "drafted",
        "drafted wider",
        "redrafted",
        "child closed",
        "parent closed",
        "tree dropped by an append",
    ],
)
def test_equal_tables_have_equal_digests(entries):
    assert digest_of(*entries) == digest_of(*BASE)


OTHERS = {
    "reversed pair (vllm-ascend#14040)": (*BASE[:2], *(Append(0, int32(s)) for s in (6, 5, 7)), *BASE[3:]),
    "rotated tile (SGLang#31218)": (*BASE[:2], *(Append(0, int32(s)) for s in (7, 5, 6)), *BASE[3:]),
    "one slot more": (*BASE[:2], Append(0, int32(5, 6, 7, 9)), *BASE[3:]),
    "one slot fewer": (*BASE[:2], Append(0, int32(5, 6)), *BASE[3:]),
    "another slot": (*BASE[:2], Append(0, int32(5, 6, 9)), *BASE[3:]),
    "all off by one": (*BASE[:2], Append(0, int32(4, 5, 6)), *BASE[3:]),
    "sequences exchanged": (*BASE[:2], Append(1, int32(5, 6, 7)), Append(0, int32(8)), Draft(0, int32(10, 11))),
    "last slot in the other sequence": (*BASE[:2], Append(0, int32(5, 6)), Append(1, int32(7, 8)), BASE[4]),
    "one sequence more": (*BASE, Open(2)),
    "another sequence number": (Open(0), Open(2), BASE[2], Append(2, int32(8)), Draft(2, int32(10, 11))),
    "tree in the other sequence": (*BASE[:4], Draft(0, int32(10, 11))),
    "no tree": BASE[:4],
    "tree committed": (*BASE, Commit(1, int32(0, 1))),
    "root committed": (*BASE, Commit(1, int32(0))),
    "another tree": (*BASE[:4], Draft(1, int32(10, 12))),
    "forked": (*BASE, Fork(0, 2)),
    "forked from the other": (*BASE, Fork(1, 2)),
    "empty": (),
}


def test_different_tables_have_different_digests():
    digests = {name: digest_of(*entries) for name, entries in OTHERS.items()} | {"base": digest_of(*BASE)}
    for (a, digest_a), (b, digest_b) in itertools.combinations(digests.items(), 2):
        assert digest_a != digest_b, f"{a} and {b}"
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests.values())


def test_every_single_change_of_a_small_mapping_shows():
    """All injective mappings of 3 positions into 6 slots, in two sequences: 240 tables, 240 digests."""
    digests = {
        digest_of(Open(seq), *(Append(seq, int32(slot)) for slot in slots))
        for seq in (0, 1)
        for slots in itertools.permutations(range(1, 7), 3)
    }
    assert len(digests) == 240


def test_slot_hash_equals_its_definition_in_python_integers():
    """The vectorised sum, wrapped mod 2^64, is the sum of products of the two key streams; terms add over positions."""
    hash_, rng = SlotHash(1000), random.Random(0)
    slot_keys = [int(k) for k in np.random.PCG64(1).random_raw(1000)]
    position_keys = [int(k) for k in np.random.PCG64(2).random_raw(1000)]
    for start, n in ((0, 0), (0, 1), (0, 1000), (17, 33), (900, 100)):
        slots = rng.sample(range(1000), n)
        terms = sum(slot_keys[slot] * position_keys[start + i] for i, slot in enumerate(slots))
        assert hash_(np.array(slots, np.int32), start) == terms & MASK64


def test_mix_is_splitmix64():
    """First outputs of SplitMix64 seeded with 0 and with 1234567 (the generator's published test values)."""
    assert [mix64(i * 0x9E3779B97F4A7C15 & MASK64) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert mix64(1234567) == 6457827717110365317
