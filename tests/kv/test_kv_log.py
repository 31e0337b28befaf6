"""KvLog and Replica on small hand-checked inputs, most of them from public bug reports of other engines."""

import random

import msgspec
import numpy as np
import pytest
from kv_model import int32, random_log, random_parents, random_path

from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.log import Close, Commit, Draft, Entry, Fork, KvLog, Open, Replica


def snapshot(log, seqs):
    tables = {seq: (log.prefix_slots(seq).tolist(), log.tree_slots(seq).tolist()) for seq in seqs}
    return tables, log.stats(), log.digest()


# --- one call at a time


def test_commit_keeps_accepted_slots_where_they_are():
    """SGLang#15360: the accepted nodes, scattered over the tree, were read as if they were its first rows."""
    log = KvLog(64)
    seq = log.open()
    prompt = log.append(seq, 3).tolist()
    tree = log.draft(seq, 6).tolist()
    log.commit(seq, [0, 2, 5])
    assert log.prefix_slots(seq).tolist() == [*prompt, tree[0], tree[2], tree[5]]
    assert log.tree_slots(seq).size == 0
    expected = {"free": 57, "scratch": 0, "live": 6, "shared": 0, "sequences": 1, "entries": 4}
    assert log.stats() == expected | {"quarantined": 0, "withheld": 0, "cached": 0, "evictable": 0}


def test_commit_off_the_spine_for_a_batch_of_two():
    """dflash test_dflash_tree_verify (width 2, N = 15, accepted [0, 2, 4]: the last row is node 4, not index 2);
    SGLang#26866: N = 15 nodes, 7 steps, batch of two, bounds taken from the wrong one of them."""
    log = KvLog(64)
    a, b = log.open(), log.open()
    tree_a, tree_b = log.draft(a, 15).tolist(), log.draft(b, 15).tolist()
    log.commit(b, np.array([0, 2, 4], np.int32))
    log.commit(a, np.array([0, 1, 3, 5, 7, 9, 11, 14]))
    assert log.prefix_slots(b).tolist() == [tree_b[0], tree_b[2], tree_b[4]]
    assert log.prefix_slots(a).tolist() == [tree_a[i] for i in (0, 1, 3, 5, 7, 9, 11, 14)]


def test_path_cut_at_eos_frees_the_rest():
    """SGLang#2723: EOS at index 1 of an accepted path of 3; the rows behind it must be freed."""
    log = KvLog(64)
    seq = log.open()
    tree = log.draft(seq, 8).tolist()
    log.commit(seq, [0, 3, 6][:2])
    assert log.prefix_slots(seq).tolist() == [tree[0], tree[3]]
    assert log.stats()["free"] == 61


def test_length_follows_acceptance():
    """mlxcel#994 (rewound by two too many), aprender#2014 (length zeroed)."""
    log, expected = KvLog(256), 5
    seq = log.open()
    log.append(seq, 5)
    for path in ([0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 7], [0, 1, 2]):
        log.draft(seq, 8)
        assert log.length(seq) == expected
        log.commit(seq, path)
        expected += len(path)
        assert log.length(seq) == expected == log.prefix_slots(seq).size


def test_redraft_drops_the_earlier_tree():
    log = KvLog(64)
    seq = log.open()
    log.draft(seq, 20)
    log.draft(seq, 5)
    assert log.stats()["scratch"] == 5 and log.tree_slots(seq).size == 5


def test_redraft_and_append_may_use_the_slots_of_the_tree_they_drop():
    log, replica = KvLog(11), Replica(11)
    seq = log.open()
    log.draft(seq, 8)
    assert log.draft(seq, 10).size == 10
    assert log.append(seq, 10).size == 10
    assert replica.apply(*log.pending()) == log.digest()
    assert replica.prefix_slots(seq).tolist() == list(range(1, 11)) and replica.tree_slots(seq).size == 0


def test_append_drops_the_tree():
    log = KvLog(64)
    seq = log.open()
    log.draft(seq, 4)
    log.append(seq, 2)
    with pytest.raises(ArgumentError, match="seq: expected a sequence with a drafted tree"):
        log.commit(seq, [0])
    assert (log.length(seq), log.stats()["scratch"]) == (2, 0)


def test_fork_shares_slots_and_never_writes_them():
    """LMCache#2671: rows of a shared prefix were written while others read them."""
    log = KvLog(64)
    parent = log.open()
    shared = log.append(parent, 10).tolist()
    log.draft(parent, 4)
    child = log.fork(parent)
    assert log.prefix_slots(child).tolist() == shared and log.tree_slots(child).size == 0
    assert log.tree_slots(parent).size == 4 and log.stats()["shared"] == 10
    written = [*log.append(child, 6).tolist(), *log.draft(parent, 6).tolist(), *log.draft(child, 6).tolist()]
    assert not set(written) & set(shared) and len(set(written)) == 18


def test_child_reads_on_after_the_parent_closed():
    """mini-sglang#142, #52: a prefix freed, or evicted, while another request's table still pointed at it."""
    log = KvLog(40)
    parent = log.open()
    shared = log.append(parent, 10).tolist()
    child = log.fork(parent)
    grandchild = log.fork(child)
    log.append(parent, 5)
    log.close(parent)
    assert log.prefix_slots(child).tolist() == shared and log.stats()["free"] == 29
    others = log.append(log.open(), 29).tolist()
    assert not set(others) & set(shared)
    log.close(child)
    assert log.prefix_slots(grandchild).tolist() == shared and log.stats()["free"] == 0
    log.close(grandchild)
    assert log.stats()["free"] == 10


def test_tables_handed_out_outlive_growth_and_close():
    """TensorRT-LLM#15546, #16280: a table rewritten under its reader, and a commit across the end of its buffer."""
    log = KvLog(1000)
    seq = log.open()
    log.append(seq, 60)
    view, before = log.prefix_slots(seq), log.prefix_slots(seq).tolist()
    log.draft(seq, 8)
    log.commit(seq, range(8))
    log.append(seq, 200)
    assert log.prefix_slots(seq).tolist()[:60] == before
    log.close(seq)
    log.append(log.open(), 500)
    assert view.tolist() == before


@pytest.mark.parametrize("table", ["prefix_slots", "tree_slots"])
def test_tables_are_read_only(table):
    log = KvLog(16)
    seq = log.open()
    log.append(seq, 2)
    log.draft(seq, 2)
    with pytest.raises(ValueError, match="read-only"):
        getattr(log, table)(seq)[0] = 7


def test_padding_sink_is_never_handed_out():
    """xLLM#1944: rows without a token overwrote valid KV; padding goes to slot 0 here, so nobody may own it."""
    log = KvLog(17)
    seq = log.open()
    assert sorted(log.append(seq, 16).tolist()) == list(range(1, 17))


def test_entries_are_compact_on_the_wire():
    log = KvLog(64)
    seq = log.open()
    log.draft(seq, 2)
    log.commit(seq, [0, 1])
    log.fork(seq)
    log.close(seq)
    entries = [Open(0), Draft(0, int32(1, 2)), Commit(0, int32(0, 1)), Fork(0, 1), Close(0)]
    assert log.pending() == (1, entries) and log.pending() == (6, [])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entries), type=list[Entry]) == entries
    assert len(msgspec.msgpack.encode(entries[1])) == 18


# --- refusals change nothing


@pytest.mark.parametrize(
    ("call", "error", "argument"),
    [
        (lambda log: log.append(0, 0), ArgumentError, "n"),
        (lambda log: log.append(0, True), ArgumentError, "n"),
        (lambda log: log.draft(0, -1), ArgumentError, "n"),
        (lambda log: log.draft(0, 1025), ArgumentError, "n"),
        (lambda log: log.append(7, 1), ArgumentError, "seq"),
        (lambda log: log.append(False, 1), ArgumentError, "seq"),
        (lambda log: log.close(True), ArgumentError, "seq"),
        (lambda log: log.draft("0", 1), ArgumentError, "seq"),
        (lambda log: log.commit(7, [0]), ArgumentError, "seq"),
        (lambda log: log.commit(1, [0]), ArgumentError, "seq"),
        (lambda log: log.commit(0, []), ArgumentError, "path"),
        (lambda log: log.commit(0, [1, 2]), ArgumentError, "path"),
        (lambda log: log.commit(0, [0, 2, 2]), ArgumentError, "path"),
        (lambda log: log.commit(0, [0, 4]), ArgumentError, "path"),
        (lambda log: log.commit(0, [0, 2**32 + 1]), ArgumentError, "path"),
        (lambda log: log.commit(0, [[0, 1]]), ArgumentError, "path"),
        (lambda log: log.commit(0, [0.0, 1.0]), ArgumentError, "path"),
        (lambda log: log.fork(7), ArgumentError, "seq"),
        (lambda log: log.close(7), ArgumentError, "seq"),
        (lambda log: log.length(None), ArgumentError, "seq"),
        (lambda log: log.prefix_slots(7), ArgumentError, "seq"),
        (lambda log: log.tree_slots([0]), ArgumentError, "seq"),
        (lambda log: log.resize(1), ArgumentError, "num_slots"),
        (lambda log: log.resize(16.0), ArgumentError, "num_slots"),
        (lambda log: log.append(1, 24), PoolFull, "24 slots needed, 23 are free"),
        (lambda log: log.draft(0, 28), PoolFull, "28 slots needed, 27 are free"),
        (lambda log: log.open(), PoolFull, "max_sequences=2"),
        (lambda log: log.fork(0), PoolFull, "max_sequences=2"),
    ],
)
def test_refused_calls_change_nothing(call, error, argument):
    log = KvLog(32, max_sequences=2)
    log.open(), log.open()
    log.append(0, 4)
    log.draft(0, 4)
    before = snapshot(log, [0, 1])
    with pytest.raises(error, match=argument):
        call(log)
    assert snapshot(log, [0, 1]) == before
    assert len(log.pending()[1]) == 4


@pytest.mark.parametrize("num_slots", [np.int64(20), np.uint8(20), np.array(20)])
def test_a_size_of_any_integer_type_goes_on_the_wire(num_slots):
    log, replica = KvLog(32), Replica(32)
    log.resize(num_slots)
    first, entries = log.pending()
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(entries), type=list[Entry])
    assert replica.apply(first, wire) == log.digest()


def test_closing_twice_is_refused_and_frees_once():
    """sglang-jax#982: the same slots freed by two paths."""
    log = KvLog(32)
    seq = log.open()
    log.append(seq, 8)
    log.close(seq)
    with pytest.raises(ArgumentError, match="seq"):
        log.close(seq)
    assert log.stats()["free"] == 31
    assert len(set(log.append(log.open(), 31).tolist())) == 31


@pytest.mark.parametrize("num_slots", [1, 0, -5, 2**31, 10.0, None])
def test_pool_sizes_out_of_range(num_slots):
    with pytest.raises(ArgumentError, match="num_slots"):
        KvLog(num_slots)
    with pytest.raises(ArgumentError, match="num_slots"):
        Replica(num_slots)


# --- leaks


@pytest.mark.parametrize("nodes", [1, 16, 64, 129])
def test_slots_return_after_many_requests(nodes):
    """SGLang#13826, #31616, sglang-jax#1147, #1098: 128 slots leaked a request because drafts were never recorded."""
    rng, log = random.Random(nodes), KvLog(600)
    for _ in range(100):
        seq = log.open()
        log.append(seq, rng.randint(1, 64))
        for _ in range(rng.randint(0, 10)):
            tree = log.draft(seq, nodes).size
            if rng.random() < 0.8:
                log.commit(seq, random_path(rng, random_parents(rng, tree))[:30])
        log.close(seq)
        stats = log.stats()
        assert (stats["free"], stats["live"], stats["scratch"], stats["sequences"]) == (599, 0, 0, 0)
    assert log.digest() == KvLog(600).digest()


def test_counters_never_drift_over_thousands_of_rounds():
    """llama.cpp#14059 (the used counter drifted after thousands of tasks), SGLang#27789 (one page at a time),
    vLLM#37076, #39146 (divergence under cancel and eviction storms)."""
    log, entries, digests, model = random_log(seed=1, rounds=6000)
    model.check_states(log.stats())
    model.check_sharing()
    replica = Replica(200)
    for number, entry in enumerate(entries, 1):
        assert replica.apply(number, [entry]) == digests[number]
    model.check_tables(log)
    model.check_tables(replica)
    for seq in model.prefix:
        log.close(seq)
    assert log.stats()["free"] == 199
    assert sorted(log.append(log.open(), 199).tolist()) == list(range(1, 200))


def test_alternating_live_and_free_slots_are_all_usable():
    """llama.cpp#6685: the worst fragmentation, every other slot live."""
    log = KvLog(129)
    seqs = [log.open() for _ in range(128)]
    slots = {seq: log.append(seq, 1).tolist()[0] for seq in seqs}
    for seq in seqs:
        if slots[seq] % 2:
            log.close(seq)
    seq = log.open()
    assert log.append(seq, 64).tolist() == list(range(1, 129, 2))
    with pytest.raises(PoolFull):
        log.draft(seq, 1)
