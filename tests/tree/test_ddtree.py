"""The DDTree builder against literal vectors and against sorting all prefixes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracles import (
    brute_force,
    check_structure,
    float32_logprobs,
    levelwise,
    ranked_rows,
    tokens_and_parents,
    tree_fields,
)

import tpverify.tree as tv
from tpverify.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("backend")

HALVES = np.log(np.array([[0.5, 0.25, 0.125, 0.125]] * 3)).astype(np.float32)
HALVES_IDS = np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])


def topk(logprobs, k):
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(logprobs, order, axis=1), order


def test_d1_ties():
    """Own vector D1: powers of two, so that sums tie exactly."""
    build = lambda budget: tv.build_ddtree_topk(HALVES, HALVES_IDS, root_token=7, budget=budget)  # noqa: E731
    assert build(3).tokens.tolist() == [7, 10, 20, 11] and build(3).parents.tolist() == [-1, 0, 1, 0]
    tree = build(8)
    assert tree.tokens.tolist() == [7, 10, 20, 11, 30, 21, 20, 12, 13]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 2, 1, 3, 0, 0]
    assert tree.depths.tolist() == [0, 1, 2, 1, 3, 2, 2, 1, 1]
    assert tree.first_child.tolist() == [1, 2, 4, 6, -1, -1, -1, -1, -1]
    assert tree.next_sibling.tolist() == [-1, 3, 5, 7, -1, -1, -1, 8, -1]
    probabilities = [0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125, 0.125]
    assert math.isclose(sum(probabilities), 1.625)
    wider = build(12)
    assert wider.tokens.tolist()[9:] == [31, 30, 22, 23] and wider.parents.tolist()[9:] == [2, 5, 1, 1]
    check_structure(wider)


def test_d3_vocabulary_smaller_than_the_budget():
    """Own vector D3: two tokens, two depths, six prefixes."""
    logprobs = np.log(np.array([[0.7, 0.3], [0.6, 0.4]])).astype(np.float32)
    tree = tv.build_ddtree_topk(logprobs, [[1, 2], [3, 4]], root_token=0, budget=10, vocab_size=5)
    assert tree.tokens.tolist() == [0, 1, 3, 2, 4, 3, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 1, 3, 3]
    assert math.isclose(0.7 + 0.42 + 0.3 + 0.28 + 0.18 + 0.12, 2.0)
    full = tv.build_ddtree(logprobs, root_token=0, budget=10)
    assert full.tokens.tolist() == [0, 0, 0, 1, 1, 0, 1] and full.exact and not tree.exact


def test_d4_single_depth():
    """Own vector D4; TRT-LLM #10323: a depth-1 tree must not raise."""
    logprobs = np.log(np.array([[0.5, 0.3, 0.2]])).astype(np.float32)
    tree = tv.build_ddtree_topk(logprobs, [[5, 6, 7]], root_token=1, budget=3)
    assert tree.tokens.tolist() == [1, 5, 6, 7] and tree.parents.tolist() == [-1, 0, 0, 0]


def test_d5_peaked_gives_a_chain_first():
    """Own vector D5: .97 at each of three depths."""
    logprobs = np.log(np.array([[0.97, 0.03]] * 3)).astype(np.float32)
    tree = tv.build_ddtree_topk(logprobs, [[10, 11], [20, 21], [30, 31]], root_token=1, budget=4)
    assert tree.tokens.tolist() == [1, 10, 20, 30, 11] and tree.parents.tolist() == [-1, 0, 1, 2, 0]


def test_d6_flat_gives_the_first_depth_first():
    """Own vector D6: .34/.33/.33 twice."""
    logits = np.log(np.array([[0.34, 0.33, 0.33]] * 2)).astype(np.float32)
    assert tv.build_ddtree(logits, root_token=1, budget=5).parents.tolist() == [-1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_d7_no_budget_or_no_draft_is_the_root_alone(depth):
    """Own vector D7."""
    for tree in (
        tv.build_ddtree(np.zeros((depth, 4), np.float32), root_token=9, budget=0),
        tv.build_ddtree(np.zeros((0, 4), np.float32), root_token=9, budget=8),
        tv.build_ddtree_topk(np.zeros((depth, 0), np.float32), np.zeros((depth, 0), int), root_token=9, budget=0),
        tv.build_ddtree_topk(HALVES, HALVES_IDS, root_token=9, budget=0),
        tv.build_ddtree_topk(np.zeros((0, 4), np.float32), np.zeros((0, 4), int), root_token=9, budget=8),
    ):
        assert (tree.tokens.tolist(), tree.parents.tolist(), tree.exact) == ([9], [-1], True)
        check_structure(tree)


def test_vllm_port_accepts_through_the_tree():
    """tmt-ai-corp test_ddtree.py, V=6: the tree, and the walk for posterior [1,3,5,0,0]."""
    logits = np.full((3, 6), -10.0, np.float32)
    logits[0, [1, 2]], logits[1, [3, 4]], logits[2, 5] = (4, 3), (5, 1), 6
    tree = tv.build_ddtree(logits, root_token=0, budget=4)
    assert tree.tokens.tolist()[1:] == [1, 3, 5, 2] and tree.parents.tolist() == [-1, 0, 1, 2, 0]
    accepted = tv.accept_greedy(tree, [1, 3, 5, 0, 0])
    assert accepted.path.tolist() == [0, 1, 2, 3] and accepted.bonus == 0


def test_vllm_port_positions():
    """tmt-ai-corp test_ddtree.py, V=8: root 11 at position 7."""
    logits = np.full((2, 8), -10.0, np.float32)
    logits[0, [1, 2]], logits[1, 3] = (4, 3), 5
    tree = tv.build_ddtree(logits, root_token=11, budget=3)
    assert tree.tokens.tolist() == [11, 1, 3, 2] and tree.depths.tolist() == [0, 1, 2, 1]
    assert tree.positions(7).tolist() == [7, 8, 9, 8]


@pytest.mark.parametrize(
    ("depth", "vocab", "budget"),
    [(7, 1000, b) for b in (1, 2, 16, 32, 64, 128, 256)]
    + [(7, 151936, 64), (7, 151936, 256), (3, 1000, 16), (15, 1000, 512), (1, 1000, 64)],
)
def test_build_grid(depth, vocab, budget):
    """t4_tree_build.py of the SGLang DDTree port: its (depth, vocab, budget) grid."""
    logits = np.random.default_rng(depth * budget).normal(0, 3, (depth, vocab)).astype(np.float32)
    logprobs = float32_logprobs(logits)
    rows = [
        [(float(logprobs[d, i]), int(i)) for i in sorted(np.argsort(-row)[: budget + 8], key=lambda i: (-row[i], i))]
        for d, row in enumerate(logits)
    ]
    tree = tv.build_ddtree(logits, root_token=3, budget=budget)
    tokens, parents = tokens_and_parents(rows, levelwise(rows, budget), 3)
    assert tree.tokens.tolist() == tokens and tree.parents.tolist() == parents and tree.exact
    check_structure(tree)


def test_levelwise_oracle_is_the_brute_force():
    rng = np.random.default_rng(5)
    for _ in range(50):
        depth, vocab, budget = (int(x) for x in rng.integers(1, (4, 6, 20)))
        rows = ranked_rows(np.log(rng.choice([0.5, 0.25, 0.125], (depth, vocab))).astype(np.float32))
        assert levelwise(rows, budget) == brute_force(rows, budget)


levels = st.sampled_from([0.0, -0.5, -0.75, -1.0, -2.0, -4.0, -math.inf])
continuous = st.floats(-20.0, 0.0, width=32)


@st.composite
def candidates(draw):
    depth, k = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    element = draw(st.sampled_from([levels, continuous]))
    rows = np.array(
        draw(st.lists(st.lists(element, min_size=k, max_size=k), min_size=depth, max_size=depth)), np.float32
    )
    rows[:, 0] = np.where(np.isinf(rows).all(axis=1), -1.0, rows[:, 0])
    ids = np.array([draw(st.permutations(range(k + 2)))[:k] for _ in range(depth)])
    return -np.sort(-rows, axis=1), ids


@settings(max_examples=300, deadline=None)
@given(candidates(), st.integers(0, 40))
def test_heap_is_the_brute_force(case, budget):
    """Tied, impossible and continuous scores; ids in any order among equals."""
    logprobs, ids = case
    rows = ranked_rows(logprobs, ids)
    tree = tv.build_ddtree_topk(logprobs, ids, root_token=99, budget=budget)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == tokens_and_parents(rows, brute_force(rows, budget), 99)
    check_structure(tree)


@settings(max_examples=200, deadline=None)
@given(candidates(), st.integers(0, 40), st.booleans())
def test_exact_says_whether_an_unseen_rank_could_be_in_the_tree(case, budget, whole_vocabulary):
    """The oracle sorts the unseen rank K in at rank K-1's score, and looks whether it precedes the last node."""
    logprobs, ids = case
    k = logprobs.shape[1]
    if whole_vocabulary:
        ids = np.argsort(np.argsort(ids, axis=1), axis=1)  # 0..K-1 in each row: nothing is unseen
    else:
        ids = ids + 1
    rows = [[*row, (row[-1][0], None)] for row in ranked_rows(logprobs, ids)]
    entries = [r for r in brute_force(rows, 10**6) if k not in r[:-1]]
    real = [i for i, ranks in enumerate(entries) if ranks[-1] < k]
    unseen = [i for i, ranks in enumerate(entries) if ranks[-1] == k]
    last = real[budget - 1] if budget <= len(real) else len(entries)
    expected = whole_vocabulary or budget == 0 or not any(i < last for i in unseen)
    assert tv.build_ddtree_topk(logprobs, ids, root_token=0, budget=budget).exact == expected


def test_the_largest_id_does_not_overflow_the_vocabulary_taken_from_it(backend):
    top = 2**63 - 1
    tree = tv.build_ddtree_topk([[-0.1], [-0.2]], [[top], [top]], root_token=0, budget=4)
    assert tree.tokens.tolist() == [0, top, top] and not tree.exact


def test_exact_trees_from_few_candidates_are_the_full_trees():
    rng = np.random.default_rng(1)
    counts = {True: 0, False: 0}
    for _ in range(200):
        logits = rng.normal(0, rng.choice([0.5, 2.0, 6.0]), (4, 30)).astype(np.float32)
        budget, k = int(rng.integers(1, 40)), int(rng.integers(1, 30))
        full = tv.build_ddtree(logits, root_token=0, budget=budget)
        few = tv.build_ddtree_topk(*topk(float32_logprobs(logits), k), root_token=0, budget=budget, vocab_size=30)
        counts[few.exact] += 1
        assert few.exact or k < min(budget, 30)
        if few.exact:
            assert tree_fields(few) == tree_fields(full)
    assert min(counts.values()) > 20


def test_equal_logits_rank_by_token_id():
    """torch.topk leaves the order of equal logits open; here the lower id comes first, from logits and from top-k."""
    logits = np.array([[1, 3, 3, 0, 3]], np.float32)
    assert tv.build_ddtree(logits, root_token=0, budget=2).tokens.tolist() == [0, 1, 2]
    logprobs = np.full((1, 3), np.log(np.float32(0.3)), np.float32)
    assert tv.build_ddtree_topk(logprobs, [[4, 1, 2]], root_token=0, budget=3).tokens.tolist() == [0, 1, 2, 4]


def test_distinct_logits_that_round_to_one_logprob_keep_their_order():
    logits = np.zeros((1, 5000), np.float32)
    logits[0, 10], logits[0, 20] = 0.25, np.nextafter(np.float32(0.25), np.float32(1))
    assert len(set(float32_logprobs(logits)[0, [10, 20]])) == 1
    assert tv.build_ddtree(logits, root_token=0, budget=2).tokens.tolist() == [0, 20, 10]


def test_impossible_tokens_are_never_nodes():
    logits = np.array([[0, -np.inf, -np.inf], [-np.inf, 0, 0]], np.float32)
    tree = tv.build_ddtree(logits, root_token=5, budget=20)
    assert tree.tokens.tolist() == [5, 0, 1, 2] and tree.exact
    tree = tv.build_ddtree_topk([[0.0, -np.inf]], [[3, 4]], root_token=5, budget=20)
    assert tree.tokens.tolist() == [5, 3] and tree.exact


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("far", [3e38, 3.4e38, float(np.finfo(np.float32).max)])
def test_logits_far_apart_keep_every_token(far):
    """Their difference, the log-probability, is below float32's range; the token is improbable, not impossible."""
    logits = np.array([[far, -far, -np.inf, 0.0, -far / 2]], np.float32)
    tree = tv.build_ddtree(logits, root_token=9, budget=8)
    assert tree.tokens.tolist() == [9, 0, 3, 4, 1] and tree.exact


def test_rounding_above_zero_counts_as_zero():
    """A log-probability from log(softmax) in float32 can be 1e-7 above 0; it must not outrank its ancestors."""
    above, at = ([[1e-7, -9.0], [1e-4, -9.0]], [[0.0, -9.0], [0.0, -9.0]])
    trees = [tv.build_ddtree_topk(rows, [[0, 1], [0, 1]], root_token=5, budget=4) for rows in (above, at)]
    assert tree_fields(trees[0]) == tree_fields(trees[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_torch_and_numpy_agree(dtype):
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (5, 300))).to(dtype)
    expected = tv.build_ddtree(logits.float().numpy(), root_token=0, budget=50)
    assert tree_fields(tv.build_ddtree(logits.requires_grad_(), root_token=0, budget=50)) == tree_fields(expected)
    strided = logits.detach().repeat_interleave(2, dim=1)[:, ::2]
    assert tree_fields(tv.build_ddtree(strided, root_token=0, budget=50)) == tree_fields(expected)


def test_full_size_tree_of_depth_64():
    tree = tv.build_ddtree(
        np.random.default_rng(3).normal(0, 8, (64, 256)).astype(np.float32), root_token=0, budget=1023
    )
    assert len(tree) == 1024 and tree.depths.max() <= 64
    check_structure(tree)
    chain = tv.build_ddtree_topk(np.full((64, 1), -0.5, np.float32), np.zeros((64, 1), int), root_token=0, budget=1023)
    assert chain.depths.tolist() == list(range(65)) and chain.exact


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        pytest.param({"budget": -1}, "budget", id="budget -1"),
        pytest.param({"budget": 1024}, "budget", id="budget 1024"),
        pytest.param({"budget": 2.0}, "budget", id="float budget"),
        pytest.param({"budget": True}, "budget", id="boolean budget"),
        pytest.param({"root_token": np.False_}, "root_token", id="boolean root"),
        pytest.param({"root_token": -1}, "root_token", id="negative root"),
        pytest.param({"root_token": None}, "root_token", id="no root"),
        pytest.param({"logits": np.zeros((65, 3), np.float32)}, "logits", id="depth 65"),
        pytest.param({"logits": np.zeros((2, 0), np.float32)}, "logits", id="no vocabulary"),
        pytest.param({"logits": np.zeros(3, np.float32)}, "logits", id="one axis"),
        pytest.param({"logits": np.zeros((2, 3), int)}, "logits", id="integers"),
        pytest.param({"logits": np.array([[0, 1, 2], [0, NAN, 1]], np.float32)}, "logits", id="NaN (SGLang #36201)"),
        pytest.param({"logits": np.array([[0, 1, INF]], np.float32)}, "logits", id="+inf"),
        pytest.param({"logits": np.array([[0, 1e39]])}, "logits", id="+inf once in float32"),
        pytest.param({"logits": np.full((1, 3), -INF, np.float32)}, "logits", id="nothing possible"),
        pytest.param({"logits": torch.zeros(1, 3, device="meta")}, "logits", id="tensor not on the CPU"),
    ],
)
def test_build_refuses(changes, argument):
    arguments = {"logits": np.zeros((2, 3), np.float32), "root_token": 0, "budget": 4} | changes
    with pytest.raises(ArgumentError) as error:
        tv.build_ddtree(arguments.pop("logits"), **arguments)
    assert error.value.argument == argument


TOPK_REFUSALS = [
    pytest.param({"logprobs": [[-1, NAN], [-1, -2]]}, "logprobs", "log-probabilities at most 0", id="NaN"),
    pytest.param({"logprobs": [[NAN, NAN], [-1, -2]]}, "logprobs", "log-probabilities at most 0", id="NaN first"),
    pytest.param({"logprobs": [[-1, -2], [INF, -2]]}, "logprobs", "log-probabilities at most 0", id="+inf"),
    pytest.param({"logprobs": [[0.5, 0.25], [-1, -2]]}, "logprobs", "log-probabilities at most 0", id="probabilities"),
    pytest.param({"logprobs": [[-1, -2], [-2, -1]]}, "logprobs", "descending rows", id="ascending"),
    pytest.param({"logprobs": [[-1, -2], [-INF, -1]]}, "logprobs", "descending rows", id="-inf first"),
    pytest.param({"logprobs": [[-1, -2], [-INF, -INF]]}, "logprobs", "a finite entry in each row", id="all -inf"),
    pytest.param({"token_ids": [[1, 1], [0, 1]]}, "token_ids", "distinct ids in a row", id="duplicate siblings"),
    pytest.param({"token_ids": [[0, 1], [0, -1]]}, "token_ids", "ids >= 0", id="negative id"),
    pytest.param(
        {"token_ids": [[0, 9], [0, 1]], "vocab_size": 9}, "token_ids", "ids in 0..8", id="outside the vocabulary"
    ),
    pytest.param({"token_ids": [[0, 1]]}, "token_ids", None, id="shapes differ"),
    pytest.param({"token_ids": [[0.0, 1.0], [0.0, 1.0]]}, "token_ids", None, id="float ids"),
    pytest.param(
        {"logprobs": np.zeros((2, 0)), "token_ids": np.zeros((2, 0), int)}, "logprobs", None, id="no candidate"
    ),
    pytest.param({"logprobs": np.zeros((65, 1)), "token_ids": np.zeros((65, 1), int)}, "logprobs", None, id="depth 65"),
    pytest.param({"budget": -1}, "budget", None, id="budget -1"),
    pytest.param({"budget": 1024}, "budget", None, id="budget 1024"),
    pytest.param({"root_token": 2**63}, "root_token", None, id="root beyond int64"),
    pytest.param({"root_token": False}, "root_token", None, id="boolean root"),
    pytest.param({"budget": True}, "budget", None, id="boolean budget"),
    pytest.param({"vocab_size": 0}, "vocab_size", None, id="empty vocabulary"),
]


@pytest.mark.parametrize(("changes", "argument", "expected"), TOPK_REFUSALS)
def test_build_topk_refuses(changes, argument, expected):
    arguments = {"logprobs": [[-1.0, -2.0]] * 2, "token_ids": [[0, 1]] * 2, "root_token": 0, "budget": 4} | changes
    with pytest.raises(ArgumentError) as error:
        tv.build_ddtree_topk(np.array(arguments.pop("logprobs"), float), arguments.pop("token_ids"), **arguments)
    assert error.value.argument == argument
    assert expected is None or f"expected {expected}, got" in str(error.value)
