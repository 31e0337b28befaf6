"""Acceptance: literal walks, exactness of the sampled law, and inputs that must be refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from tree_oracles import chi_square_bound, closure, float32_logprobs

import tpverify.tree as tv
from tpverify.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize(
    ("drafted", "target", "path", "bonus"),
    [
        ([100, 101, 102, 103, 999, 105, 106, 107], [101, 102, 103, 888, 700, 701, 702, 703], 4, 888),
        ([200, 777, 202, 203, 204, 205, 206, 207], [201, 800, 801, 802, 803, 804, 805, 806], 1, 201),
        ([300, 301, 302, 303, 304, 305, 306, 307], [301, 302, 303, 304, 305, 306, 307, 308], 8, 308),
    ],
)
def test_width_one_tree_is_the_chain(drafted, target, path, bonus):
    """SGLang test_dflash_tree_verify.py and TRT-LLM #15842: commit lengths 4, 1, 8; bonus 888, 201, 308."""
    accepted = tv.accept_greedy(tv.DraftTree.chain(drafted), target)
    assert accepted.path.tolist() == list(range(path)) and accepted.bonus == bonus
    assert accepted.path.dtype == np.int32 and type(accepted.bonus) is int


def test_off_spine_path_gives_node_indices():
    """SGLang test_dflash_tree_verify.py and #15360: width-2 tree of 15, accepted [0,2,4]; the last is node 4."""
    parents = [-1, 0, 0] + [2 * ((i - 1) // 2) for i in range(3, 15)]
    tree = tv.DraftTree.from_parents(np.arange(50, 65), parents)
    targets = np.zeros(15, int)
    targets[[0, 2, 4]] = 52, 54, 999
    accepted = tv.accept_greedy(tree, targets)
    assert accepted.path.tolist() == [0, 2, 4] and accepted.bonus == 999
    assert tree.depths[accepted.path].tolist() == [0, 1, 2]


def test_trees_of_one_batch_do_not_mix():
    """SGLang #26866: batch of unequal trees (15 and 3 nodes, 8 and 2 deep); the bonus of the second was wrong."""
    deep = tv.DraftTree.from_parents(np.arange(100, 115), [-1, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6])
    flat = tv.DraftTree.from_parents([7, 8, 9], [-1, 0, 0])
    for order in ([deep, flat], [flat, deep]):
        results = [tv.accept_greedy(t, np.append(t.tokens[1:], 0) if t is deep else [9, 1, 2]) for t in order]
        by_tree = dict(zip(map(id, order), results, strict=True))
        assert by_tree[id(deep)].path.tolist() == list(range(8)) and by_tree[id(deep)].bonus == 108
        assert by_tree[id(flat)].path.tolist() == [0, 2] and by_tree[id(flat)].bonus == 2


def test_largest_tree():
    """1,024 nodes, a path of 64 drafted nodes."""
    parents = list(range(-1, 64)) + [i % 64 for i in range(65, 1024)]
    tree = tv.DraftTree.from_parents(np.arange(1024), parents)
    accepted = tv.accept_greedy(tree, np.append(np.arange(1, 65), np.full(960, 5000)))
    assert accepted.path.tolist() == list(range(65)) and accepted.bonus == 5000
    probs = np.full((1024, 1024), 0.0)
    probs[np.arange(1024), np.minimum(np.arange(1, 1025), 1023)] = 1.0
    sampled = tv.accept_sampled(tree, probs, np.full(1024, 0.5), 0.5)
    assert sampled.path.tolist() == list(range(65)) and sampled.bonus == 65


def target_of(prefix):
    """A target model as a function of the path's tokens alone."""
    return hash(prefix) % 4


def test_a_larger_tree_accepts_at_least_as_much():
    """TRT-LLM #10343, lucebox #414: siblings must not shorten the accepted path; a tree is at least its chain."""
    rng = np.random.default_rng(0)
    gains = 0
    for _ in range(200):
        logits = rng.normal(0, 1, (5, 4)).astype(np.float32)
        lengths = []
        for budget in (0, 1, 5, 20, 60):
            tree = tv.build_ddtree(logits, root_token=0, budget=budget)
            mask = closure(tree.parents)
            targets = [target_of(tuple(tree.tokens[mask[i]].tolist())) for i in range(len(tree))]
            accepted = tv.accept_greedy(tree, targets)
            lengths.append(len(accepted.path))
        assert lengths == sorted(lengths)
        gains += lengths[-1] > lengths[1]
    assert gains > 100


P = [0.5, 0.3, 0.2]


@pytest.mark.parametrize(
    ("coin", "path", "bonus"),
    [(0.25, [0, 1], 9), (0.30, [0, 1], 9), (0.31, [0, 2], 9), (0.80, [0, 2], 9), (0.81, [0], 2)],
)
@pytest.mark.parametrize("final_coin", [0.0, 0.5, 1 - 2.0**-53])
def test_target_only_sampling_by_hand(coin, path, bonus, final_coin):
    """Cases for p = [.5,.3,.2] with children [1,0], worked by hand from the kernel's rule (`<=`)."""
    tree = tv.DraftTree.from_parents([5, 1, 0], [-1, 0, 0])
    probs = np.zeros((3, 10))
    probs[0, :3], probs[1:, 9] = P, 1.0
    accepted = tv.accept_sampled(tree, probs, [coin, 0.9, 0.9], final_coin)
    assert accepted.path.tolist() == path and accepted.bonus == bonus


def test_thresholds():
    """0/0 always takes the first child; threshold_single takes a child by itself; threshold_acc widens the coin."""
    tree = tv.DraftTree.from_parents([5, 1, 0], [-1, 0, 0])
    probs = np.array([P] * 3)

    def accept(coin, single, acc):
        return tv.accept_sampled(tree, probs, [coin, 0.99, 0.99], 0.0, single, acc).path.tolist()

    assert accept(0.99, 0.0, 0.0) == [0, 1]
    assert accept(0.99, 0.4, 1.0) == [0, 2] and accept(0.99, 0.6, 1.0) == [0]
    assert accept(0.59, 1.0, 0.5) == [0, 1] and accept(0.61, 1.0, 0.5) == [0, 2]
    assert accept(0.99, 1.0, 0.0) == [0, 1]


def test_a_token_of_probability_zero_is_never_emitted():
    """A coin or a final coin of exactly 0 must not pick it, although 0 <= 0."""
    tree = tv.DraftTree.from_parents([5, 0, 1], [-1, 0, 0])
    probs = np.array([[0.0, 0.0, 0.0, 1.0]] * 3)
    accepted = tv.accept_sampled(tree, probs, np.zeros(3), 0.0)
    assert accepted.path.tolist() == [0] and accepted.bonus == 3


def test_rounding_that_leaves_nothing_off_the_children():
    """The children hold all the mass and add up to less than the coin: the last possible one is taken."""
    tree = tv.DraftTree.from_parents([9, 0, 1, 2], [-1, 0, 0, 0])
    probs = np.array([[0.3, 0.6999, 0.0]] * 4)
    accepted = tv.accept_sampled(tree, np.hstack([probs, np.zeros((4, 7))]), np.full(4, 0.99999), 0.5)
    assert accepted.path.tolist() == [0, 2]


VOCAB, STEPS = 3, 3


def model():
    """A target over 3 tokens: its law after every prefix of up to 2 tokens, some of it near 0."""
    rng = np.random.default_rng(11)
    prefixes = [p for length in range(STEPS) for p in itertools.product(range(VOCAB), repeat=length)]
    return {prefix: rng.dirichlet(np.full(VOCAB, 0.7)) for prefix in prefixes}


def sampled_tree():
    """Root, children 2 and 0, below 2 the children 1 and 2, below 0 the child 1: no subtree is complete."""
    tree = tv.DraftTree.from_parents([7, 2, 0, 1, 2, 1], [-1, 0, 0, 1, 1, 2])
    return tree, [(), (2,), (0,), (2, 1), (2, 2), (0, 1)]


def check_law(law, sequences):
    """Chi-square of the sequences' counts against the product of the model's conditionals."""
    statistic, total = 0.0, len(sequences)
    counts = {s: sequences.count(s) for s in set(sequences)}
    for sequence in itertools.product(range(VOCAB), repeat=STEPS):
        expected = total * math.prod(law[sequence[:i]][token] for i, token in enumerate(sequence))
        statistic += (counts.pop(sequence, 0) - expected) ** 2 / expected
    assert not counts
    assert statistic < chi_square_bound(VOCAB**STEPS - 1)


def test_law_of_target_only_sampling():
    """antirez/ds4 #482, DeepSpec #31 (biased rejection of deterministic drafts): the emitted law is the target's."""
    law, (tree, prefixes) = model(), sampled_tree()
    tail = np.full(VOCAB, 1 / VOCAB)
    probs = np.array([law.get(prefix, tail) if len(prefix) < STEPS else tail for prefix in prefixes])
    probs = np.hstack([probs, np.zeros((6, 5))])  # the root's token 7 needs a column
    rng, sequences, lengths = np.random.default_rng(12), [], []
    for _ in range(6000):
        accepted = tv.accept_sampled(tree, probs, rng.random(6), rng.random())
        tokens = [*tree.tokens[accepted.path[1:]].tolist(), accepted.bonus]
        lengths.append(len(accepted.path))
        while len(tokens) < STEPS:
            tokens.append(int(rng.choice(VOCAB, p=law[tuple(tokens)])))
        sequences.append(tuple(tokens[:STEPS]))
    assert {1, 2, 3} == set(lengths)
    check_law(law, sequences)


def test_law_and_stream_of_sample_and_walk():
    """One draw a position: the tree emits the very tokens of autoregressive sampling, and their law is the target's."""
    law, (tree, prefixes) = model(), sampled_tree()
    sequences, lengths = [], []
    for seed in range(6000):

        def draw(prefix, seed=seed):
            return tv.sample_token(law[prefix], tv.uniform(seed, 100 + len(prefix)))

        plain: tuple[int, ...] = ()
        while len(plain) < STEPS:
            plain += (draw(plain),)
        targets = [draw(prefix) if len(prefix) < STEPS else 0 for prefix in prefixes]
        accepted = tv.accept_greedy(tree, targets)
        walked = tv.accept_walk(tree, targets.__getitem__)
        assert (walked.path.tolist(), walked.bonus) == (accepted.path.tolist(), accepted.bonus)
        emitted = (*tree.tokens[accepted.path[1:]].tolist(), accepted.bonus)[:STEPS]
        assert emitted == plain[: len(emitted)]
        sequences.append(plain)
        lengths.append(len(accepted.path))
    assert {1, 2, 3} == set(lengths)
    check_law(law, sequences)


def test_lossy_thresholds_favour_the_draft():
    law, (tree, prefixes) = model(), sampled_tree()
    probs = np.hstack([np.array([law.get(p, law[()]) for p in prefixes]), np.zeros((6, 5))])
    rng = np.random.default_rng(1)
    first = dict.fromkeys((1.0, 0.5), 0)
    for _ in range(4000):
        coins = rng.random(6)
        for acc in first:
            first[acc] += len(tv.accept_sampled(tree, probs, coins, 0.5, 1.0, acc).path) > 1
    drafted = probs[0, 2] + probs[0, 0]
    for acc, count in first.items():
        expected = min(1.0, drafted / acc)
        assert abs(count / 4000 - expected) < 5 * math.sqrt(0.25 / 4000)


def test_torch_inputs():
    tree, _ = sampled_tree()
    probs = torch.full((6, 8), 1 / 8, dtype=torch.float32)
    accepted = tv.accept_sampled(tree, probs, torch.full((6,), 0.2), 0.1)
    assert accepted.path.tolist() == [0, 2] and accepted.bonus == 0
    assert tv.accept_greedy(tree, torch.tensor([0, 0, 1, 0, 0, 4])).path.tolist() == [0, 2, 5]


TREE = tv.DraftTree.from_parents([0, 1, 2], [-1, 0, 0])
UNIFORM = np.full((3, 4), 0.25)


@pytest.mark.parametrize(
    "targets",
    [[1, 2], [1, 2, 3, 4], [1.0, 2.0, 3.0], [[1, 2, 3]], [True, False, True], [1, 2, 2**63], None],
    ids=["short", "long", "floats", "two axes", "booleans", "beyond int64", "nothing"],
)
def test_greedy_refuses(targets):
    with pytest.raises(ArgumentError, match="target_tokens"):
        tv.accept_greedy(TREE, targets)
    with pytest.raises(ArgumentError, match="^tree: expected a DraftTree, got None"):
        tv.accept_greedy(None, [1])


def test_numpy_numbers_are_numbers():
    plain = tv.accept_sampled(TREE, UNIFORM, [0.3] * 3, 0.5, 1.0, 0.5)
    numpy = tv.accept_sampled(TREE, UNIFORM, [0.3] * 3, np.float32(0.5), np.int64(1), np.float16(0.5))
    assert (plain.path.tolist(), plain.bonus) == (numpy.path.tolist(), numpy.bonus)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        pytest.param({"target_probs": np.where(np.eye(3, 4), np.nan, 0.25)}, "target_probs", id="NaN"),
        pytest.param({"target_probs": np.where(np.eye(3, 4), np.inf, 0.25)}, "target_probs", id="inf"),
        pytest.param({"target_probs": [[-0.5, 0.5, 0.5, 0.5]] * 3}, "target_probs", id="negative"),
        pytest.param({"target_probs": UNIFORM * 1.002}, "target_probs", id="sum 1.002"),
        pytest.param({"target_probs": np.zeros((3, 4))}, "target_probs", id="sum 0"),
        pytest.param({"target_probs": UNIFORM[:2]}, "target_probs", id="a row short"),
        pytest.param({"target_probs": np.full((3, 2), 0.5)}, "target_probs", id="vocabulary too small"),
        pytest.param({"target_probs": np.ones((3, 1), int)}, "target_probs", id="integers"),
        pytest.param({"coins": [0.5, 0.5]}, "coins", id="a coin short"),
        pytest.param({"coins": [0.5, 1.0, 0.5]}, "coins", id="coin 1"),
        pytest.param({"coins": [0.5, -0.1, 0.5]}, "coins", id="coin below 0"),
        pytest.param({"coins": [0.5, np.nan, 0.5]}, "coins", id="NaN coin"),
        pytest.param({"final_coin": 1.0}, "final_coin", id="final coin 1"),
        pytest.param({"final_coin": math.nan}, "final_coin", id="NaN final coin"),
        pytest.param({"threshold_single": 1.1}, "threshold_single", id="threshold above 1"),
        pytest.param({"threshold_acc": -0.1}, "threshold_acc", id="threshold below 0"),
        pytest.param({"threshold_acc": math.nan}, "threshold_acc", id="NaN threshold"),
        pytest.param({"threshold_acc": None}, "threshold_acc", id="no threshold"),
        pytest.param({"threshold_single": "1"}, "threshold_single", id="threshold as text"),
        pytest.param({"threshold_single": True}, "threshold_single", id="boolean threshold"),
        pytest.param({"final_coin": None}, "final_coin", id="no final coin"),
        pytest.param({"final_coin": "0.5"}, "final_coin", id="final coin as text"),
        pytest.param({"tree": None}, "tree", id="no tree"),
        pytest.param(
            {"tree": tv.DraftTree.chain([1]), "target_probs": np.ones((1, 0)), "coins": [0.5]},
            "target_probs",
            id="no vocabulary",
        ),
    ],
)
def test_sampled_refuses(changes, argument):
    arguments = {"tree": TREE, "target_probs": UNIFORM, "coins": [0.5] * 3, "final_coin": 0.5} | changes
    with pytest.raises(ArgumentError) as error:
        tv.accept_sampled(**arguments)
    assert error.value.argument == argument


def test_sums_within_a_thousandth_are_accepted():
    for scale in (0.9992, 1.0008):
        assert tv.accept_sampled(TREE, UNIFORM * scale, [0.1] * 3, 0.5).path.tolist() == [0, 1]


def test_float32_probabilities_from_a_softmax():
    """float32 rows sum to 1 only within rounding; that is enough."""
    probs = np.exp(float32_logprobs(np.random.default_rng(0).normal(0, 3, (3, 4000)).astype(np.float32)))
    assert tv.accept_sampled(TREE, probs, [0.999] * 3, 0.999).path.tolist() == [0]
