"""Draft and commit by the host library: every array, digest, slot and error is the twin's, in numpy."""

import ctypes
import random

import numpy as np
import pytest
from kv_world import random_world

from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.kv.slots import NO_SLOTS
from tpverify.kv.table import SequenceTables

SLOTS = 200
ARRAYS = ("states", "readers", "cached", "positions", "owners", "generations")


@pytest.fixture(autouse=True)
def library(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)
    return host_library


@pytest.fixture
def pair(library, monkeypatch):
    """Tables with the library, and without."""
    fast = SequenceTables(SLOTS)
    monkeypatch.setattr(native, "host", lambda: None)
    plain = SequenceTables(SLOTS)
    assert fast._native is not None and plain._native is None
    return fast, plain


def outcome(change, *arguments):
    try:
        return change(*arguments).tolist()
    except ArgumentError as error:
        return str(error)


def both(pair, name, *arguments):
    """What a change of both gives; they are equal after it."""
    fast, plain = pair
    found = outcome(getattr(fast, name), *arguments)
    assert outcome(getattr(plain, name), *arguments) == found
    for array in ARRAYS:
        assert np.array_equal(getattr(fast.slots, array), getattr(plain.slots, array)), (name, array)
    assert fast.slots.generation == plain.slots.generation and fast.digest() == plain.digest()
    for (seq, one), (_, other) in zip(fast.items(), plain.items(), strict=True):
        assert one.prefix.tolist() == other.prefix.tolist() and one.tree.tolist() == other.tree.tolist(), (name, seq)
        assert (one.prefix_sum, one.tree_sum, one.hash) == (other.prefix_sum, other.tree_sum, other.hash)
    return found


def int32(values):
    return np.array(values, np.int32)


def test_random_changes(pair, library, monkeypatch):
    """Good and bad ones: slots that are taken, unsorted, doubled or outside; paths that are none."""
    rng, native_calls, refused = random.Random(5), {"tpv_draft": 0, "tpv_commit": 0}, 0
    for name in native_calls:
        call = getattr(library, name)

        def counted(params, call=call, name=name):
            native_calls[name] += (status := call(params)) == 0
            return status

        monkeypatch.setattr(library, name, counted)
    sequences = [0]
    both(pair, "open", 0, NO_SLOTS)
    for step in range(3000):
        seq, free = rng.choice(sequences), pair[0].slots.free()[1:].tolist()
        chosen = sorted(rng.sample(free, min(len(free), rng.randint(1, 12))))
        nodes = pair[0][seq].tree.size
        match rng.randrange(12):
            case 0 if len(sequences) < 6:
                sequences.append(step + 1)
                both(pair, "fork", seq, step + 1) if rng.random() < 0.5 else both(pair, "open", step + 1, NO_SLOTS)
            case 1 if len(sequences) > 1:
                sequences.remove(seq)
                both(pair, "close", seq)
            case 2 if chosen:
                both(pair, "append", seq, int32(chosen))
            case 3:
                spoiled = [*chosen, rng.choice([0, -1, SLOTS, SLOTS + 9, *range(1, SLOTS)])]
                refused += isinstance(both(pair, "draft", seq, int32(spoiled)), str)
            case 4:
                path = [rng.randint(-2, nodes + 2) for _ in range(rng.randint(0, 4))]
                refused += isinstance(both(pair, "commit", seq, int32(path)), str)
            case 5 | 6 | 7 if chosen:
                both(pair, "draft", seq, int32(chosen))
            case _ if nodes:
                path = [0, *sorted(rng.sample(range(1, nodes), rng.randint(0, nodes - 1)))]
                both(pair, "commit", seq, int32(path))
    assert min(native_calls.values()) > 300 and refused > 200


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("draft", []), ("draft", [0]), ("draft", [-1]), ("draft", [5, 5]), ("draft", [6, 5]), ("draft", [SLOTS]),
        ("draft", [2**31 - 1]), ("draft", [100]), ("draft", [99, 100]), ("draft", [90]), ("commit", []),
        ("commit", [1]), ("commit", [0, 0]), ("commit", [0, 2, 1]), ("commit", [0, 4]), ("commit", [0, 2**31 - 1]),
        ("commit", [-1, 0]), ("commit", [0, -1]),
    ],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing(pair, name, argument):
    both(pair, "open", 0, NO_SLOTS)
    both(pair, "append", 0, int32(range(90, 100)))
    both(pair, "resize", 100)
    if name == "commit":
        both(pair, "draft", 0, int32([10, 12, 14, 16]))
    before = {array: getattr(pair[0].slots, array).copy() for array in ARRAYS}
    assert "expected" in both(pair, name, 0, int32(argument))
    assert all(np.array_equal(before[array], getattr(pair[0].slots, array)) for array in ARRAYS)


def test_arrays_that_the_library_does_not_read(pair):
    """Other types and strides are the twin's."""
    both(pair, "open", 0, NO_SLOTS)
    both(pair, "draft", 0, int32(range(1, 21))[::3])
    both(pair, "commit", 0, np.array([0, 2, 3]))
    assert pair[0][0].prefix.tolist() == [1, 7, 10]


def test_a_sequence_as_long_as_the_pool(pair):
    """Positions end where the slots do."""
    both(pair, "open", 0, NO_SLOTS)
    both(pair, "append", 0, int32(range(1, SLOTS - 2)))
    both(pair, "draft", 0, int32([SLOTS - 2, SLOTS - 1]))
    both(pair, "commit", 0, int32([0, 1]))
    assert pair[0][0].length == SLOTS - 1


def test_a_struct_of_another_size_is_refused(library):
    params = native.TablesParams(8)
    assert library.tpv_draft(ctypes.byref(params)) == library.tpv_commit(ctypes.byref(params)) == 1


@pytest.mark.parametrize("seed", range(12))
def test_worlds_of_the_twin(seed, monkeypatch):
    """The others run the library's."""
    monkeypatch.setattr(native, "host", lambda: None)
    random_world(seed, operations=80, faults=0.1)
