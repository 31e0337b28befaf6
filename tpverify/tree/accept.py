"""Which drafted nodes the target agrees with: walks from the root that end with one token of the target's own."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpverify import native
from tpverify.config import check_number, check_type
from tpverify.errors import ArgumentError
from tpverify.tree.arrays import float_array, int_array
from tpverify.tree.draft_tree import DraftTree
from tpverify.tree.draws import check_coin, sample_token

SUM_TOLERANCE = 1e-3
MIN_THRESHOLD_ACC = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Accept:
    """path: int32 node indices from the root (path[0] == 0) to the last accepted node. bonus: the token after it.

    The accept length tau is len(path): the root counts, the bonus is the next step's root.
    """

    path: np.ndarray
    bonus: int


def accept_walk(tree: DraftTree, choose: Callable[[int], int]) -> Accept:
    """Follows the target from the root while its choice is among the children.

    choose(node) gives the target's token after that node, argmax or sample; it is asked only along the path, once a
    node, root first. Drawing each choice from the target's own distribution at its position ("sample and walk") emits
    the target's law whatever the tree is.
    """
    tokens, first_child, next_sibling = tree.tokens, tree.first_child, tree.next_sibling
    path = [0]
    while True:
        token = int(choose(path[-1]))
        child = first_child[path[-1]]
        while child >= 0 and tokens[child] != token:
            child = next_sibling[child]
        if child < 0:
            return Accept(np.array(path, np.int32), token)
        path.append(int(child))


def accept_greedy(tree: DraftTree, target_tokens: Any) -> Accept:
    """The walk for choices already made at every node. target_tokens: integers [n]. Raises ArgumentError."""
    check_type("tree", tree, DraftTree, "a DraftTree")
    targets = int_array("target_tokens", target_tokens, 1)
    _check_length("target_tokens", targets, tree)
    library = native.host()
    if library is None:
        return accept_walk(tree, targets.__getitem__)
    path = np.empty(len(tree), np.int32)
    params = native.AcceptGreedyParams(
        ctypes.sizeof(native.AcceptGreedyParams), _tree(tree), targets.ctypes.data, path.ctypes.data
    )
    native.check(library, library.tpv_accept_greedy(params))
    return Accept(path[: params.path_length].copy(), params.bonus)


def accept_sampled(
    tree: DraftTree,
    target_probs: Any,
    coins: Any,
    final_coin: float,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Accept:
    """Target-only tree sampling (the scheme of SGLang's and FlashInfer's kernels).

    At a node, the children are tried in ascending node index while the target's probabilities of their tokens add up to
    `acc`. A child is taken if the node's coin <= acc / threshold_acc (acc > 0), or if its own probability >=
    threshold_single. When none is taken the bonus is drawn with `final_coin` from the target without the children's
    tokens, by inverse cumulative sum in token order. When rounding leaves nothing off the children, the last child
    with any probability is taken.

    Exact at thresholds 1 and 1: every emitted token has the target's law. Below 1 it is LOSSY, in favour of the draft.

    target_probs: [n, vocab] in float64 or converted to it, row i after node i; finite, >= 0, each row's sum within 1e-3
    of 1. coins: [n] in [0, 1). Thresholds in [0, 1]; threshold_acc below 1e-9 counts as that. Raises ArgumentError.
    """
    check_type("tree", tree, DraftTree, "a DraftTree")
    probs = float_array("target_probs", target_probs, 2, np.float64)
    coins = float_array("coins", coins, 1, np.float64)
    _check_length("target_probs", probs, tree)
    _check_length("coins", coins, tree)
    largest = tree.tokens[1:].max(initial=-1)
    if largest >= probs.shape[1]:
        raise ArgumentError("target_probs", f"a column for token {largest}", f"{probs.shape[1]} columns")
    if not (coins.min() >= 0.0 and coins.max() < 1.0):
        raise ArgumentError("coins", "numbers in [0, 1)", coins[~((coins >= 0.0) & (coins < 1.0))][0])
    final_coin = check_coin("final_coin", final_coin)
    threshold_single = check_number("threshold_single", threshold_single, "a number in [0, 1]", 0.0, 1.0)
    threshold_acc = check_number("threshold_acc", threshold_acc, "a number in [0, 1]", 0.0, 1.0)
    sums = probs.sum(axis=1)
    wrong = np.flatnonzero(~((probs.min(axis=1, initial=np.inf) >= 0.0) & (np.abs(sums - 1.0) <= SUM_TOLERANCE)))
    if len(wrong):
        row = int(wrong[0])
        raise ArgumentError(
            "target_probs",
            f"rows >= 0 that sum to 1 within {SUM_TOLERANCE}",
            f"minimum {probs[row].min(initial=np.inf)}, sum {sums[row]} in row {row}",
        )
    library = native.host()
    if library is None:
        return _accept_sampled_python(
            tree, probs, coins, final_coin, threshold_single, max(threshold_acc, MIN_THRESHOLD_ACC)
        )
    path = np.empty(len(tree), np.int32)
    params = native.AcceptSampledParams(
        ctypes.sizeof(native.AcceptSampledParams), _tree(tree), probs.shape[1], probs.ctypes.data, coins.ctypes.data,
        final_coin, threshold_single, max(threshold_acc, MIN_THRESHOLD_ACC), path.ctypes.data,
    )  # fmt: skip
    native.check(library, library.tpv_accept_sampled(params))
    return Accept(path[: params.path_length].copy(), params.bonus)


def _accept_sampled_python(
    tree: DraftTree,
    probs: np.ndarray,
    coins: np.ndarray,
    final_coin: float,
    threshold_single: float,
    threshold_acc: float,
) -> Accept:
    path = [0]
    while True:
        node = path[-1]
        residual = probs[node].copy()
        acc, possible = 0.0, -1
        child = int(tree.first_child[node])
        while child >= 0:
            token = tree.tokens[child]
            p = probs[node, token]
            acc += p
            if p >= threshold_single or (acc > 0.0 and coins[node] <= acc / threshold_acc):
                break
            residual[token] = 0.0
            if p > 0.0:
                possible = child
            child = int(tree.next_sibling[child])
        if child < 0 and residual.sum() == 0.0:
            child = possible
        if child < 0:
            return Accept(np.array(path, np.int32), sample_token(residual, final_coin))
        path.append(child)


def _check_length(name: str, array: np.ndarray, tree: DraftTree) -> None:
    if len(array) != len(tree):
        raise ArgumentError(name, f"one entry for each of {len(tree)} nodes", len(array))


def _tree(tree: DraftTree) -> native.Tree:
    return native.Tree(
        tree.tokens.ctypes.data, tree.first_child.ctypes.data, tree.next_sibling.ctypes.data, len(tree), 0
    )
