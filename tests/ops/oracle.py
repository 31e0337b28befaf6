"""What verify attention is, in float64 and one node at a time; and trees to try it on. Shares no code with the
package."""

import random

import numpy as np
import torch
from torch import Tensor


def attention_oracle(
    q: Tensor, kv_pool: Tensor, prefix: Tensor, tree: Tensor, parents: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """q [n, heads, 576]; kv_pool [slots, 576]; prefix [S], tree [n] slots. float64 out [n, heads, 512] and lse [n,
    heads]."""
    outs, lses = [], []
    for node in range(len(parents)):
        rows = torch.cat([prefix.long(), tree.long()[path_to(parents, node)]])
        kv = kv_pool[rows].double()
        scores = q[node].double() @ kv.T * scale
        weights = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        total = weights.sum(dim=1, keepdim=True)
        outs.append(weights @ kv[:, :512] / total)
        lses.append((scores.max(dim=1, keepdim=True).values + total.log()).squeeze(1))
    return torch.stack(outs), torch.stack(lses)


def path_to(parents: list[int], node: int) -> list[int]:
    """Node indices from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def random_parents(rng: random.Random, n: int, max_depth: int = 64) -> list[int]:
    """Parents of a random tree: mixes long chains with wide fans, nodes in an order that is neither BFS nor DFS."""
    parents, depths = [-1], [0]
    for i in range(1, n):
        reach = rng.choice((1, 2, 8, i))
        parent = rng.randrange(max(0, i - reach), i)
        while depths[parent] >= max_depth:
            parent = rng.randrange(i)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def distinct_tokens(parents: list[int]) -> np.ndarray:
    """Tokens such that siblings differ."""
    return np.arange(len(parents), dtype=np.int64)
