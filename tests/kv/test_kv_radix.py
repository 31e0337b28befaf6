"""The prefix cache by hand-checked cases; kv_world.py checks it against brute force at random."""

import numpy as np
import pytest

from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.log import Evict, KvLog, Open, Replica, Retain


def kept(log, tokens):
    """Cache tokens by a sequence that ends; its slots."""
    seq = log.open(tokens)
    if len(tokens) > log.length(seq):
        log.append(seq, len(tokens) - log.length(seq))
    slots = log.prefix_slots(seq).tolist()
    log.close(seq, tokens)
    return slots


def test_the_longest_prefix_is_found_wherever_it_ends():
    log = KvLog(64)
    slots = kept(log, [1, 2, 3, 4, 5, 6])
    for tokens, length in (
        ([1, 2, 3, 4, 5, 6, 7], 6),
        ([1, 2, 3, 4, 5, 6], 5),
        ([1, 2, 3, 9], 3),
        ([1], 0),
        ([9, 1, 2], 0),
        ([], 0),
        (np.array([1, 2, 9], np.int32), 2),
    ):
        seq = log.open(tokens)
        assert log.prefix_slots(seq).tolist() == slots[:length]
        log.close(seq)
    assert log.stats()["cached"] == 6


def test_branches_share_their_stem():
    log = KvLog(64)
    first = kept(log, [1, 2, 3, 4, 5])
    second = kept(log, [1, 2, 3, 7, 8])
    assert first[:3] == second[:3] and not set(first[3:]) & set(second[3:])
    assert log.stats()["cached"] == 7 == log.stats()["evictable"]
    assert log.prefix_slots(log.open([1, 2, 3, 7, 8, 9])).tolist() == second


def test_two_sequences_with_the_same_tokens():
    """mini-sglang#142: the duplicate's slots were freed while its own table still pointed at them."""
    log = KvLog(64)
    one, two = log.open([1, 2, 3]), log.open([1, 2, 3])
    first, second = log.append(one, 3).tolist(), log.append(two, 3).tolist()
    log.cache(one, [1, 2, 3])
    log.cache(two, [1, 2, 3])
    assert log.prefix_slots(two).tolist() == second and log.stats()["cached"] == 3
    log.append(two, 2)
    log.cache(two, [1, 2, 3, 4, 5])
    assert log.prefix_slots(log.open([1, 2, 3, 4, 5, 6])).tolist() == first + log.prefix_slots(two).tolist()[3:]
    log.close(two)
    assert log.stats()["cached"] == 5 and log.stats()["free"] == 63 - 5


def test_what_is_read_is_never_evicted():
    """mini-sglang#52: the lock left out the node itself."""
    log = KvLog(21)
    kept(log, [1, 2, 3, 4, 5])
    kept(log, [1, 2, 3, 7, 8])
    reader = log.open([1, 2, 3, 7, 9])
    slots = log.prefix_slots(reader).tolist()
    assert len(slots) == 4 and log.stats()["evictable"] == 3
    log.make_room(16)
    assert log.stats()["cached"] == 4 and log.prefix_slots(reader).tolist() == slots
    with pytest.raises(PoolFull, match="17 slots needed, 16 are free$") as full:
        log.append(reader, 17)
    assert (full.value.needed, full.value.free, full.value.evictable) == (17, 16, 0)
    log.close(reader)
    log.make_room(20)
    assert log.stats()["cached"] == 0


def test_the_least_recently_used_goes_first():
    log = KvLog(300 * 3 + 1)
    for branch in (1, 2, 3):
        kept(log, [branch] * 300)
    log.close(log.open([1] * 300 + [5]))
    log.append(log.open(), 10)
    assert [log._cache.cached(np.array([branch] * 300)) for branch in (1, 2, 3)] == [300, 236, 300]


def test_refusals_say_what_could_be_evicted_and_evict_nothing():
    log = KvLog(31)
    kept(log, list(range(10)))
    seq = log.open()
    log.append(seq, 15)
    with pytest.raises(PoolFull, match="16 slots needed, 5 are free, 10 more can be evicted"):
        log.draft(seq, 16)
    assert log.stats()["cached"] == 10
    log.draft(seq, 15)
    assert log.stats()["cached"] == 0


def test_an_aborted_prompt_leaves_only_what_it_wrote():
    """SGLang#38355: the tree kept rows of a prompt that was aborted half way."""
    log = KvLog(64)
    seq = log.open(list(range(20)))
    log.append(seq, 8)
    with pytest.raises(ArgumentError, match="tokens: expected ids of at most the 8 committed positions, got 20"):
        log.close(seq, list(range(20)))
    log.close(seq, list(range(8)))
    assert log.length(log.open(list(range(20)))) == 8


@pytest.mark.parametrize("tokens", [[0.5], "ab", [[1]], None])
def test_tokens_that_are_none(tokens):
    log = KvLog(16)
    seq = log.open()
    with pytest.raises(ArgumentError, match="tokens"):
        log.cache(seq, tokens)


def test_rows_are_cached_under_one_key_only():
    log = KvLog(32)
    kept(log, [1, 2, 3, 4])
    seq = log.open([1, 2, 3, 4, 5])
    with pytest.raises(ArgumentError, match="tokens: expected the ids under which these rows are already cached"):
        log.cache(seq, [6, 7])


def test_a_split_is_no_news_to_ranks():
    """SGLang#38480: a split between two events lost half a node."""
    log, replica = KvLog(64), Replica(64)
    kept(log, [1, 2, 3, 4, 5, 6])
    replica.apply(*log.pending())
    log.open([1, 2, 3, 9])
    first, entries = log.pending()
    assert [type(entry) for entry in entries] == [Open]
    assert replica.apply(first, entries) == log.digest()
    log.close(1)
    log.make_room(63)
    first, entries = log.pending()
    assert [type(entry) for entry in entries][-1] == Evict
    assert replica.apply(first, entries) == log.digest() == KvLog(64).digest()


def test_entries_of_the_cache_are_checked_by_ranks():
    log = KvLog(32)
    kept(log, [1, 2, 3, 4])
    entries = log.pending()[1]
    for wrong, said in (
        (Open(5, entries[-2].slots[:0] + np.array([2, 3], "<i4").tobytes()), "the cached slots of positions 0, 1, 2"),
        (Open(5, np.array([9, 2], "<i4").tobytes()), "cached slots"),
        (Retain(entries[-2].slots), "not yet cached"),
        (Evict(np.array([9, 1], "<i4").tobytes()), "cached slots"),
    ):
        replica = Replica(32)
        replica.apply(1, entries)
        with pytest.raises(Exception, match=said):
            replica.apply(len(entries) + 1, [wrong])


class NoNumbers:
    """As a tensor on a GPU, or one of bfloat16."""

    def __array__(self, *_, **__):
        raise TypeError("not to numpy")


@pytest.mark.parametrize(
    "tokens",
    [
        [[1], [1, 2]], [[1, 2]], 3, [1.0, 2.0], [True], "ab", [2**70], [None], NoNumbers(),
        np.array([2**64 - 1], np.uint64),
    ],
)  # fmt: skip
def test_what_are_no_token_ids_is_refused_by_name(tokens):
    log = KvLog(16)
    seq = log.open()
    log.append(seq, 1)
    for call in (log.open, log.shared, lambda ids: log.close(seq, ids)):
        with pytest.raises(ArgumentError, match="^tokens: expected token ids, int"):
            call(tokens)
    assert log.stats()["sequences"] == 1


def test_ids_beyond_int64_are_not_taken_for_negative_ones():
    log = KvLog(16)
    kept(log, [-1, -1, -1])
    assert log.length(log.open(np.array([-1, -1, -1]))) == 2
    assert log.length(log.open(np.array([1, 1, 1], np.uint64))) == 0
    with pytest.raises(ArgumentError, match="tokens"):
        log.open(np.array([2**64 - 1] * 3, np.uint64))


def test_what_is_shared_ends_where_the_match_does():
    """A fork reads the end of a branch whose start, from another sequence, nobody reads."""
    log = KvLog(64)
    first, second = log.open(), log.open()
    log.append(first, 10), log.append(second, 20)
    log.close(first, range(10))
    log.fork(second)
    log.close(second, range(20))
    assert [log.shared(range(n)) for n in (1, 11, 12, 15, 21)] == [0, 0, 1, 4, 10]
