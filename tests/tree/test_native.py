"""The host library: equal to its Python twins, and well-behaved as a C ABI."""

import ctypes
import threading

import numpy as np
import pytest
from tree_oracles import tree_fields

import tpverify.tree as tv
from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.tree.ancestry import ancestry, checked_ancestry
from tpverify.tree.ddtree import best_first_python


@pytest.fixture(autouse=True)
def _use_native(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)


def random_case(rng, kind):
    depth, k = int(rng.integers(0, 9)), int(rng.integers(1, 12))
    if kind == 0:
        raw = rng.choice([0.0, -0.25, -0.5, -1.0, -2.0, -np.inf], (depth, k))
    elif kind == 1:
        raw = -rng.exponential(rng.choice([0.1, 1.0, 10.0]), (depth, k))
    else:
        raw = np.round(-rng.exponential(1.0, (depth, k)), 1)
    raw[:, 0] = np.where(np.isinf(raw).all(axis=1), 0.0, raw[:, 0])
    vocab = k + int(rng.integers(0, 4))
    return -np.sort(-raw.astype(np.float32), axis=1), np.argsort(rng.random((depth, vocab)), axis=1)[:, :k], vocab


def test_builder_is_the_twin():
    """Thousands of cases: continuous, tied and impossible scores, vocabulary known and not, any budget."""
    rng = np.random.default_rng(4)
    inexact = 0
    for case in range(4000):
        logprobs, ids, vocab = random_case(rng, case % 3)
        budget = int(rng.choice([0, 1, 3, 20, 70, 200]))
        known = vocab if case % 2 else 0
        ours = tv.build_ddtree_topk(logprobs, ids, root_token=8, budget=budget, vocab_size=known or None)
        assert tree_fields(ours) == tree_fields(best_first_python(logprobs, ids, 8, budget, known)), case
        inexact += not ours.exact
    assert 400 < inexact < 3600


def test_ancestry_is_the_twin(host_library, monkeypatch):
    """Trees of every width of a row, and parents that are no tree's, each with the twin's words."""
    rng = np.random.default_rng(6)
    for case in range(600):
        n = int(rng.choice([1, 2, 33, 63, 64, 65, 128, 129, 1024]))
        reach = int(rng.choice([1, 3, n]))
        parents = [-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, n))]
        depths, words = checked_ancestry(np.array(parents, "<i4").tobytes())
        seen = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        for node in rng.integers(0, n, 5).tolist():
            above = [node]
            while above[-1] > 0:
                above.append(parents[above[-1]])
            assert np.flatnonzero(seen[node]).tolist() == sorted(above) and depths[node] == len(above) - 1, case
        twin_depths, twin_words = ancestry(parents)
        assert depths.tolist() == twin_depths and np.array_equal(words, twin_words) and words.shape == twin_words.shape
        assert (depths.dtype, words.dtype) == (np.int32, np.uint64)
        assert not depths.flags.writeable and not words.flags.writeable
    wrong = ([0], [-2], [-1, 1], [-1, 0, -1], [-1, 0, 5], [-1, 0, 1, 3], [], [-1] + [0] * 1024)
    for raw in [*(np.array(parents, "<i4").tobytes() for parents in wrong), b"\xff" * 5, b"\xff" * 4097]:
        texts = []
        for library in (host_library, None):
            monkeypatch.setattr(native, "host", lambda found=library: found)
            with pytest.raises(ArgumentError) as error:
                checked_ancestry(raw)
            texts.append(str(error.value))
        assert texts[0] == texts[1] and texts[0].startswith("parents"), raw


def test_acceptance_is_the_twin(host_library, monkeypatch):
    rng = np.random.default_rng(5)
    lengths = set()
    for case in range(2000):
        logprobs, ids, vocab = random_case(rng, case % 3)
        tree = tv.build_ddtree_topk(logprobs, ids, root_token=0, budget=40)
        n = len(tree)
        targets = rng.integers(0, min(vocab, 3), n)
        probs = rng.dirichlet(np.full(vocab, 0.3), n)
        probs[probs < 0.05] = 0.0
        probs /= probs.sum(axis=1, keepdims=True)
        coins, last = rng.choice([rng.random(n), np.zeros(n), np.full(n, 1 - 2.0**-53)]), rng.random()
        thresholds = (1.0, 1.0) if case % 2 else tuple(rng.random(2))
        results = []
        for library in (host_library, None):
            monkeypatch.setattr(native, "host", lambda found=library: found)
            greedy, sampled = tv.accept_greedy(tree, targets), tv.accept_sampled(tree, probs, coins, last, *thresholds)
            results.append([greedy.path.tolist(), greedy.bonus, sampled.path.tolist(), sampled.bonus])
            lengths.add(len(sampled.path))
        assert results[0] == results[1], case
    assert lengths >= {1, 2, 3, 4}


def test_a_struct_of_another_size_is_refused(host_library):
    for name, params in native.FUNCTIONS.items():
        status = getattr(host_library, name)(params(ctypes.sizeof(params) - 8))
        with pytest.raises(ArgumentError, match=f"struct_size: expected {ctypes.sizeof(params)}, got"):
            native.check(host_library, status)
        with pytest.raises(ArgumentError, match="params: expected a struct, got NULL"):
            native.check(host_library, getattr(host_library, name)(None))


def test_null_arrays_are_refused(host_library):
    arrays = {"logprobs": np.zeros((1, 1), np.float32), "token_ids": np.zeros((1, 1), int), "tokens": np.zeros(2, int)}
    params = native.DdtreeParams(ctypes.sizeof(native.DdtreeParams), 1, 1, 1)
    for field in ("logprobs", "token_ids", "tokens", "parents"):
        with pytest.raises(ArgumentError, match=f"{field}: expected an array, got NULL"):
            native.check(host_library, host_library.tpv_build_ddtree(params))
        if field in arrays:
            setattr(params, field, arrays[field].ctypes.data)
    for name in ("tpv_accept_greedy", "tpv_accept_sampled"):
        accept = native.FUNCTIONS[name](ctypes.sizeof(native.FUNCTIONS[name]))
        with pytest.raises(ArgumentError, match="tokens: expected an array, got NULL"):
            native.check(host_library, getattr(host_library, name)(accept))


@pytest.mark.parametrize(
    ("field", "value"), [("depth", 65), ("depth", -1), ("k", -1), ("budget", 1024), ("budget", -1)]
)
def test_the_library_checks_its_own_limits(host_library, field, value):
    params = native.DdtreeParams(ctypes.sizeof(native.DdtreeParams))
    setattr(params, field, value)
    with pytest.raises(ArgumentError) as error:
        native.check(host_library, host_library.tpv_build_ddtree(params))
    assert error.value.argument == field


@pytest.mark.parametrize(
    ("first_child", "next_sibling"),
    [([1, 0], [-1, -1]), ([1, -1], [-1, 1]), ([2, -1], [-1, -1]), ([-2, -1], [-1, -1])],
    ids=["cycle (SGLang #7477)", "own sibling", "beyond the tree (SGLang #36201)", "negative"],
)
def test_malformed_links_are_refused_not_followed(host_library, first_child, next_sibling):
    tokens, targets, path = np.array([1, 2]), np.array([2, 2]), np.empty(2, np.int32)
    first_child, next_sibling = np.array(first_child, np.int32), np.array(next_sibling, np.int32)
    tree = native.Tree(tokens.ctypes.data, first_child.ctypes.data, next_sibling.ctypes.data, 2)
    size = ctypes.sizeof(native.AcceptGreedyParams)
    params = native.AcceptGreedyParams(size, tree, targets.ctypes.data, path.ctypes.data)
    with pytest.raises(ArgumentError, match="tree: expected links to later nodes"):
        native.check(host_library, host_library.tpv_accept_greedy(params))


def test_messages_belong_to_their_thread(host_library):
    params = native.DdtreeParams(ctypes.sizeof(native.DdtreeParams), 65)
    assert host_library.tpv_build_ddtree(params) == 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(host_library.tpv_last_error()))
    thread.start()
    thread.join(10)
    assert seen == [b""] and b"depth" in host_library.tpv_last_error()
