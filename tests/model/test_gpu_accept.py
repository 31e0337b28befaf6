"""Accept and ranking in torch operations, on the CPU, against the host's walk, draws and order."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from tpverify.model.gpu_accept import choose, choose_greedy, paths, rank_tokens, walk
from tpverify.tree import DraftTree, accept_walk, build_ddtree, build_ddtree_topk, sample_token, softmax

VOCAB = 12
DEPTH = 15


def random_tree(draw: random.Random, n: int, kind: str) -> DraftTree:
    """At most n nodes, at most DEPTH deep; siblings have distinct tokens."""
    tokens, parents, depths = [draw.randrange(VOCAB)], [-1], [0]
    free = [draw.sample(range(VOCAB), VOCAB)]
    for _ in range(n - 1):
        parent = {"star": 0, "chain": len(tokens) - 1}.get(kind, draw.randrange(len(tokens)))
        if depths[parent] < DEPTH and free[parent]:
            tokens.append(free[parent].pop())
            free.append(draw.sample(range(VOCAB), VOCAB))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree.from_parents(tokens, parents)


def forest(seed: int) -> list[DraftTree]:
    draw = random.Random(seed)
    kinds = draw.choices(["star", "chain", "random"], k=draw.randrange(1, 5))
    return [random_tree(draw, draw.randrange(1, 60), kind) for kind in kinds]


def agreeable(draw: np.random.Generator, trees: list[DraftTree], ties: bool) -> np.ndarray:
    """Logits float32 [n, VOCAB] that often favour a child of the node, so that paths get long."""
    rows = []
    for tree in trees:
        logits = draw.standard_normal((len(tree), VOCAB)).astype(np.float32)
        if ties:
            logits = np.round(logits)  # a row has three or four values, so most maxima are shared
        for node in np.flatnonzero(draw.random(len(tree)) < 0.6):
            if node:
                logits[tree.parents[node], tree.tokens[node]] = logits[tree.parents[node]].max() + 6 * (not ties)
        rows.append(logits)
    return np.concatenate(rows)


def host_choice(logits: np.ndarray, temperatures: np.ndarray, draws: np.ndarray, node: int) -> int:
    if temperatures[node] == 0:
        return int(logits[node].argmax())
    return sample_token(softmax(logits[node], temperatures[node]), draws[node])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.5])
def test_walks_are_the_hosts(temperature: float, ties: bool) -> None:
    """Some 1,800 trees in 720 batches, padded; temperatures of neighbours differ."""
    longest = 0
    for seed in range(120):
        draw, trees = np.random.default_rng([seed, ties]), forest(seed)
        sizes = [len(tree) for tree in trees]
        n, padding, batch = sum(sizes), int(draw.integers(0, 9)), len(trees) + int(draw.integers(0, 3))
        logits, draws = agreeable(draw, trees, ties), draw.random(n)
        temperatures = np.repeat([temperature * (index % 3 != 2) for index in range(len(trees))], sizes)
        begins = np.cumsum([0, *sizes])
        parents = np.concatenate([np.maximum(t.parents, 0) + b for t, b in zip(trees, begins, strict=False)])
        cells = np.concatenate([t.depths + index * (DEPTH + 1) for index, t in enumerate(trees)])

        def padded(values: np.ndarray, fill: np.ndarray | float, padding: int = padding) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([values, np.broadcast_to(fill, padding)]).astype(values.dtype))

        tokens = padded(np.concatenate([tree.tokens for tree in trees]), 0)
        rows = torch.cat([torch.from_numpy(logits), torch.zeros(padding, VOCAB)])
        choices = choose(rows, padded(temperatures, 0), padded(draws, 0))
        if temperature == 0:
            assert torch.equal(choices, choose_greedy(rows))
        reached = walk(tokens, padded(parents.astype(np.int64), np.arange(n, n + padding)), choices, DEPTH)
        found = paths(reached, padded(cells.astype(np.int64), batch * (DEPTH + 1)), batch, DEPTH + 1)
        assert (found[len(trees) :] == -1).all()
        for tree, begin, path in zip(trees, begins, found.numpy(), strict=False):
            given = [values[begin : begin + len(tree)] for values in (logits, temperatures, draws)]
            expected = accept_walk(tree, partial(host_choice, *given))
            assert (path[path >= 0] - begin).tolist() == expected.path.tolist()
            assert int(choices[path.max()]) == expected.bonus
            longest = max(longest, len(expected.path))
    assert longest > (2 if ties else 8)


def test_a_walk_covers_its_whole_depth() -> None:
    for n in range(1, DEPTH + 2):
        tokens = torch.arange(n)
        parents = (tokens - 1).clamp(min=0)
        for wrong in range(n):
            choices = tokens + 1
            choices[wrong] = 0
            assert walk(tokens, parents, choices, DEPTH).tolist() == [node <= wrong for node in range(n)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_choose_no_token(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1] = bad
    logits[2, 0] = -torch.inf  # a token that cannot be
    choices = choose(logits, torch.full((3,), temperature).double(), torch.zeros(3).double())
    assert choices.tolist() == [0, -1, 1]


def test_a_draw_next_to_one_takes_the_last_token_with_weight() -> None:
    draws = np.nextafter(1.0, 0.0) * np.ones(64)
    logits = np.random.default_rng(0).standard_normal((64, 7)).astype(np.float32) * 9
    logits[:, 5:] = -np.inf
    choices = choose(torch.from_numpy(logits), torch.ones(64).double(), torch.from_numpy(draws))
    assert choices.tolist() == [sample_token(softmax(row, 1.0), u) for row, u in zip(logits, draws, strict=True)]


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_those_that_trees_are_built_from(ties: bool) -> None:
    """From the device's candidates comes the tree that the host builds from the logits; equal ones rank by id."""
    draw = np.random.default_rng(3)
    for count in (1, 7, 40):
        logits = (draw.standard_normal((2, 5, 40)) * 3).astype(np.float32)
        logits = np.round(logits) if ties else logits
        logprobs, token_ids = rank_tokens(torch.from_numpy(logits), count)
        assert (logprobs.shape, logprobs.dtype) == ((2, 5, count), torch.float32)
        for rows, *ranked in zip(logits, logprobs.numpy(), token_ids.numpy(), strict=True):
            order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
            np.testing.assert_array_equal(ranked[1], order)
            exact = rows - np.log(np.exp(rows.astype(np.float64)).sum(1, keepdims=True))
            np.testing.assert_allclose(ranked[0], np.take_along_axis(exact, order, 1), rtol=1e-6)
            tree = build_ddtree_topk(*ranked, root_token=0, budget=count, vocab_size=40)
            expected = build_ddtree(rows, root_token=0, budget=count)
            assert (
                tree.tokens.tolist() == expected.tokens.tolist() and tree.parents.tolist() == expected.parents.tolist()
            )
