"""DraftTree: the literal structures of public tests, and malformed trees."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tree_oracles import check_structure, tree_fields

import tpverify.tree as tv
from tpverify.errors import ArgumentError


def test_sglang_reconstruct_indices():
    """SGLang test_ngram_utils.py: rows 1000/1100/1010/1011 after 12 committed tokens."""
    tree = tv.DraftTree.from_parents([100, 11, 22, 33], [-1, 0, 0, 2])
    assert tree.first_child.tolist() == [1, -1, 3, -1]
    assert tree.next_sibling.tolist() == [-1, 2, -1, -1]
    assert tree.positions(12).tolist() == [12, 13, 13, 14] and tree.positions(12).dtype == np.int64
    assert tree.ancestor_words().tolist() == [[1], [3], [5], [13]]
    check_structure(tree)


def test_sglang_uneven_closure():
    """SGLang test_dflash_tree.py: parents [-1,0,0,2,2,3]."""
    tree = tv.DraftTree.from_parents(range(6), [-1, 0, 0, 2, 2, 3])
    rows = ["".join(str(int(x)) for x in row) for row in tree.ancestor_mask()]
    assert rows == ["100000", "110000", "101000", "101100", "101010", "101101"]
    check_structure(tree)


def test_sglang_width_one_closure_is_lower_triangular():
    """SGLang test_dflash_tree.py: a width-1 tree is the causal chain."""
    tree = tv.DraftTree.chain(np.arange(70))
    assert (tree.ancestor_mask() == np.tri(70, dtype=bool)).all()
    assert tree.positions(5).tolist() == list(range(5, 75))
    check_structure(tree)


def test_sglang_grammar_traversal():
    """SGLang test_spec_utils_traverse_tree.py: a walk over the links accepts {11,22,33} and fills nodes {0,1,2,3}."""
    tree = tv.DraftTree.from_parents([100, 11, 22, 33], [-1, 0, 0, 2])
    seen, stack = [], [0]
    while stack:
        node = stack.pop()
        seen.append(node)
        child = int(tree.first_child[node])
        while child != -1:
            stack.append(child)
            child = int(tree.next_sibling[child])
    assert sorted(seen) == [0, 1, 2, 3]
    assert {int(tree.tokens[i]) for i in seen if i} == {11, 22, 33}


def test_mask_to_links_round_trip():
    """SGLang test_dflash_tree.py and reconstruct_indices: the parent is the nearest bit left of the diagonal."""
    rng = np.random.default_rng(0)
    for n in (1, 2, 63, 64, 65, 129, 1024):
        parents = [-1] + [int(rng.integers(0, i)) for i in range(1, n)]
        tree = tv.DraftTree.from_parents(np.arange(n), parents)
        mask = tree.ancestor_mask()
        found = [int(np.flatnonzero(mask[i, :i])[-1]) if mask[i, :i].any() else -1 for i in range(n)]
        assert found == parents
        check_structure(tree)


def test_inputs_of_any_integer_kind():
    expected = tv.DraftTree.from_parents([5, 6, 7], [-1, 0, 1])
    for tokens, parents in (
        (np.array([5, 6, 7], np.uint8), np.array([-1, 0, 1], np.int8)),
        (torch.tensor([5, 6, 7]), torch.tensor([-1, 0, 1], dtype=torch.int32)),
        (np.arange(10)[5:8][::-1][::-1], np.array([-1, 9, 0, 9, 1, 9])[::2]),
    ):
        tree = tv.DraftTree.from_parents(tokens, parents)
        assert tree.tokens.tolist() == expected.tokens.tolist() and tree.parents.tolist() == expected.parents.tolist()


def test_a_tree_keeps_no_reference_to_its_inputs():
    tokens, parents = np.array([5, 6]), np.array([-1, 0])
    tree = tv.DraftTree.from_parents(tokens, parents)
    tokens[1] = parents[1] = 77
    assert tree.tokens.tolist() == [5, 6] and tree.parents.tolist() == [-1, 0]
    with pytest.raises(ValueError, match="read-only"):
        tree.tokens[0] = 1
    with pytest.raises(AttributeError):
        tree.tokens = tokens


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_a_copy_is_equal_and_read_only_too(copied):
    logprobs = np.array([[-0.1, -0.2], [-0.1, -0.9]], np.float32)
    ids = np.array([[4, 2], [1, 9]])
    for tree in (
        tv.DraftTree.from_parents(np.arange(70), [-1, *(i // 2 for i in range(69))]),
        tv.build_ddtree_topk(logprobs, ids, root_token=3, budget=9, vocab_size=50),
    ):
        twin = copied(tree)
        assert tree_fields(twin) == tree_fields(tree)
        for name in ("tokens", "parents", "depths", "first_child", "next_sibling"):
            assert not getattr(twin, name).flags.writeable
        assert not twin.ancestor_words().flags.writeable


@pytest.mark.parametrize(
    ("tokens", "parents", "argument"),
    [
        pytest.param([1, 2, 3], [-1, 2, 1], "parents[1]", id="cycle (SGLang #7477)"),
        pytest.param([1, 2, 3], [-1, 0, 2], "parents[2]", id="own parent"),
        pytest.param([1, 2, 3], [-1, 0, 7], "parents[2]", id="missing parent (SGLang #36201)"),
        pytest.param([1, 2, 3], [-1, -1, 0], "parents[1]", id="two roots"),
        pytest.param([1, 2, 3], [0, 0, 0], "parents[0]", id="root with a parent"),
        pytest.param([1, 2, 2], [-1, 0, 0], "tokens[2]", id="duplicate siblings (rmagur1203 11.4)"),
        pytest.param([1, -2], [-1, 0], "tokens", id="negative token"),
        pytest.param([1, 2], [-1, 0, 0], "parents", id="lengths differ"),
        pytest.param([], [], "tokens", id="empty list"),
        pytest.param(np.array([], int), np.array([], int), "tokens", id="no node"),
        pytest.param(np.arange(1025), np.arange(1025) - 1, "tokens", id="1025 nodes"),
        pytest.param([1.0, 2.0], [-1, 0], "tokens", id="float tokens"),
        pytest.param([1, 2], np.array([-1.0, 0.0]), "parents", id="float parents"),
        pytest.param([True, False], [-1, 0], "tokens", id="boolean tokens"),
        pytest.param([[1, 2]], [-1, 0], "tokens", id="two axes"),
        pytest.param([[1], [1, 2]], [-1, 0], "tokens", id="ragged list"),
        pytest.param([1, 2**63], [-1, 0], "tokens", id="beyond int64"),
        pytest.param([1, 2**64], [-1, 0], "tokens", id="beyond uint64"),
        pytest.param("ab", [-1, 0], "tokens", id="text"),
        pytest.param(torch.empty(2, dtype=torch.int64, device="meta"), [-1, 0], "tokens", id="tensor not on the CPU"),
    ],
)
def test_malformed(tokens, parents, argument):
    with pytest.raises(ArgumentError) as error:
        tv.DraftTree.from_parents(tokens, parents)
    assert error.value.argument == argument


@pytest.mark.parametrize("committed", [-1, 1.5, None, 2**63])
def test_positions_want_a_length(committed):
    with pytest.raises(ArgumentError, match="committed"):
        tv.DraftTree.chain([1]).positions(committed)
