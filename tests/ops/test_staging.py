"""A step's tables as they reach the device: every entry against brute force, and host buffers used again in time."""

import ctypes
import random
import threading

import numpy as np
import pytest
import torch

from tpverify.errors import ArgumentError
from tpverify.ops.staging import RING_BUFFERS, Request, RequestTables, Staged, StagingRing
from tpverify.tree import DraftTree

CPU = torch.device("cpu")


class FakeEvent:
    """Of a fetch that is never done by itself: waiting for it is what is counted."""

    def __init__(self):
        self.pending, self.waits = False, 0

    def record(self):
        self.pending = True

    def synchronize(self):
        self.waits += self.pending
        self.pending = False


class Ring(StagingRing):
    """On the CPU, with what it allocated."""

    def __init__(self):
        self.sizes, self.events = [], []

        def allocate(count):
            self.sizes += [count] * (count > 4)  # but for heads
            return on_cpu(count)

        def make_event():
            self.events.append(FakeEvent())
            return self.events[-1]

        super().__init__(allocate, make_event)


def on_cpu(count):
    return torch.zeros(count, dtype=torch.int32) if count <= 4 else torch.full((count,), -7, dtype=torch.int32)


def fetched(staged):
    """int32 values that a fetch finds: by the address alone."""
    values, vectors = read(staged.source, 2, np.int64).tolist()
    return read(values, 4 * vectors, np.int32)


def upload(tables, staged, requests):
    """As a GPU does it."""
    tables.buffer.fill_(-9)
    assert tables.write(staged, requests, 32) == []
    values = fetched(staged)
    tables.buffer[: len(values)] = torch.from_numpy(values)
    assert read(tables.split_tile_rows, 1, np.int32) == 32


def random_request(rng, prefix, nodes):
    parents = [-1] + [rng.randrange(max(0, i - 3), i) for i in range(1, nodes)]
    tree = DraftTree.from_parents(np.arange(nodes), parents)
    slots = np.array(rng.sample(range(1 << 20), prefix + nodes), np.int32)
    slots.flags.writeable = False  # as a replica's are
    if rng.random() < 0.5:
        slots = torch.tensor(slots, dtype=torch.int64)
    return Request(slots[:prefix], slots[prefix:], tree.ancestor_words(), tree.depths), parents


def read(address, count, dtype):
    """What the kernels read: `count` values from an address on."""
    if not count:
        return np.empty(0, dtype)
    size = np.dtype(dtype).itemsize * count
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(dtype)


def check(tables, max_batch, requests):
    """Every table that tpverify.h names, by pointer arithmetic alone."""
    slots, *counts, words = tables.pointers()
    assert words % 8 == 0 and all(pointer % 4 == 0 for pointer in (slots, *counts))
    slot_begin, prefix_len, nodes, node_begin, word_begin = (read(row, max_batch, np.int32) for row in counts)
    node = 0
    for i, (request, parents) in enumerate(requests):
        n = len(parents)
        assert (prefix_len[i], nodes[i], node_begin[i]) == (len(request.prefix), n, node)
        got = read(slots + 4 * int(slot_begin[i]), len(request.prefix) + n, np.int32)
        assert got.tolist() == [*request.prefix.tolist(), *request.tree.tolist()]
        width = -(-n // 64)
        mask = read(words + 8 * int(word_begin[i]), n * width, np.uint64).reshape(n, width)
        for row in range(n):
            seen, at = set(), row
            while at >= 0:
                seen.add(at)
                at = parents[at]
            assert {j for j in range(64 * width) if int(mask[row, j // 64]) >> j % 64 & 1} == seen
        node += n
    assert not nodes[len(requests) :].any(), "requests that are not there have no nodes"


@pytest.mark.parametrize("max_batch", [1, 3, 4])
def test_tables_against_brute_force(max_batch):
    """One object over many steps, larger ones before smaller: nothing stays of an earlier one."""
    rng = random.Random(max_batch)
    staged, tables = Staged(on_cpu), RequestTables(max_batch, 150, 3000, CPU)
    assert len(fetched(staged)) == 0, "before the first step"
    fixed = tables.pointers(), staged.source
    check(tables, max_batch, [])
    for _ in range(12):
        lengths = [(rng.choice((0, 1, 63, 700)), rng.choice((1, 2, 64, 65, 129, 150))) for _ in range(rng.randint(0, max_batch))]  # fmt: skip  # noqa: E501
        requests = [random_request(rng, *length) for length in lengths]
        upload(tables, staged, [request for request, _ in requests])
        check(tables, max_batch, requests)
    assert (tables.pointers(), staged.source) == fixed, "graphs have these addresses"
    upload(tables, staged, [])
    check(tables, max_batch, [])


def test_the_limits_are_room_enough():
    rng = random.Random(0)
    requests = [random_request(rng, 40, 129) for _ in range(5)]
    tables = RequestTables(5, 129, 200, CPU)
    upload(tables, Staged(on_cpu), [request for request, _ in requests])
    check(tables, 5, requests)


def test_strided_and_read_only_tables():
    slots = torch.arange(200)[::2]
    words = np.asfortranarray(np.arange(10 * 1, dtype=np.uint64).reshape(10, 1))[::-1]
    words.flags.writeable = False
    tables = RequestTables(1, 10, 90, CPU)
    upload(tables, Staged(on_cpu), [Request(slots[:90], slots[90:], words, np.zeros(10, np.int32))])
    base, begin, *_, word_begin, masks = tables.pointers()
    assert read(base + 4 * int(read(begin, 1, np.int32)[0]), 100, np.int32).tolist() == list(range(0, 200, 2))
    assert read(masks + 8 * int(read(word_begin, 1, np.int32)[0]), 10, np.uint64).tolist() == list(range(9, -1, -1))


def test_a_buffer_is_waited_for_only_when_its_turn_comes_again():
    ring = Ring()
    for step in range(RING_BUFFERS):
        with ring.turn() as staged:
            staged.room(8)[:] = step
        assert fetched(staged).tolist() == [step] * 8
    assert [event.waits for event in ring.events] == [0] * RING_BUFFERS, "none had been fetched from before"
    for oldest in range(2):
        with ring.turn():
            assert [event.waits for event in ring.events] == [1] * (oldest + 1) + [0] * (RING_BUFFERS - oldest - 1)


def test_a_turn_that_fails_is_waited_for_too():
    """Perhaps after the fetch was enqueued."""
    ring = Ring()
    with pytest.raises(MemoryError), ring.turn():
        raise MemoryError
    assert [event.pending for event in ring.events] == [True] + [False] * (RING_BUFFERS - 1)
    with ring.turn():
        pass


@pytest.mark.parametrize("lengths", [[(30, 5)] * 3, [(200, 10), (0, 1)], [(5000, 1)]])
def test_requests_beyond_the_limits_are_refused(lengths):
    """And what was staged stays."""
    rng, staged, tables = random.Random(0), Staged(on_cpu), RequestTables(2, 10, 90, CPU)
    good = [random_request(rng, 40, 10)]
    upload(tables, staged, [good[0][0]])
    with pytest.raises(ArgumentError, match="^requests: expected at most 2, with tables of"):
        tables.write(staged, [random_request(rng, *length)[0] for length in lengths], 16)
    tables.buffer[: len(fetched(staged))] = torch.from_numpy(fetched(staged))
    check(tables, 2, good)


def test_words_of_another_byte_order():
    rng, staged, tables = random.Random(1), Staged(on_cpu), RequestTables(1, 70, 90, CPU)
    request, parents = random_request(rng, 20, 70)
    upload(tables, staged, [Request(request.prefix, request.tree, request.words.astype(">u8"), request.depths)])
    check(tables, 1, [(request, parents)])


def test_a_turn_is_one_thread_s():
    """Ranks may be threads of one process, with one GPU."""
    ring, order = Ring(), []

    def other():
        with ring.turn():
            order.append("other")

    with ring.turn():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_a_buffer_grows_by_doubling_and_only_after_its_fetch():
    ring = Ring()
    for size in [10, 5000, *[20] * (RING_BUFFERS - 2), 5001, 8192, 100_000]:
        with ring.turn() as staged:
            assert len(staged.room(size)) == size
            assert 0 <= len(fetched(staged)) - size < 4
    assert ring.sizes == [4096, 8192, *[4096] * (RING_BUFFERS - 2), 8192, 131072], "the second was large enough"
    assert all(event.waits == 1 for event in ring.events[:3])
