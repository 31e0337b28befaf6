"""Accept and ranking on the device: tree/accept.py's walk and the drafter's order, in operations of fixed shape.

Nothing here waits for the device or depends on data for its shapes, so that all of it can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

UNSOUND = -1  # a choice from logits that are not finite: no token, so that a walk ends there


def choose_greedy(logits: Tensor) -> Tensor:
    """The target's token after each node: int64 [n] of float32 logits [n, vocab]. The lowest id of equals."""
    top, token = logits.max(dim=1)
    return torch.where(top.abs() < torch.inf, token, UNSOUND)


def choose(logits: Tensor, temperatures: Tensor, draws: Tensor) -> Tensor:
    """The same at temperatures float64 [n]; above 0 the token whose interval of the cumulative sum, in token order,
    holds the node's draw, float64 [n] in [0, 1): see tree.sample_token."""
    greedy = choose_greedy(logits)
    wide = logits.double()
    scaled = (wide - wide.amax(dim=1, keepdim=True)) / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    cumulative = scaled.exp().cumsum(dim=1)
    total = cumulative[:, -1:]
    # draw * total may round up to total: the last token with weight then takes it.
    token = torch.minimum((cumulative <= draws[:, None] * total).sum(dim=1), (cumulative < total).sum(dim=1))
    return torch.where((temperatures > 0) & (greedy != UNSOUND), token, greedy)


def walk(tokens: Tensor, parents: Tensor, choices: Tensor, depth: int) -> Tensor:
    """bool [n]: whether the target's choices lead to a node. Many trees side by side, none deeper than `depth`.

    tokens, parents, choices int64 [n]; a root is its own parent, and is always reached.
    """
    reached = (tokens == choices[parents]) | (parents == torch.arange(len(parents), device=parents.device))
    covered = 1  # a node and so many of its ancestors, less one, are on the path
    while covered < depth:
        reached = reached & reached[parents]
        covered *= 2
        if covered < depth:
            parents = parents[parents]
    return reached


def paths(reached: Tensor, cells: Tensor, requests: int, longest: int) -> Tensor:
    """int64 [requests, longest]: each request's reached nodes by depth, -1 beyond the last.

    cells int64 [n]: request * longest + depth of each node; requests * longest for one that belongs to no path.
    """
    size = requests * longest
    path = torch.full((size + 1,), -1, dtype=torch.int64, device=reached.device)
    path.scatter_(0, torch.where(reached, cells, size), torch.arange(len(cells), device=cells.device))
    return path[:size].view(requests, longest)


def rank_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens of each row of float32 logits [..., vocab]: log-probabilities over the whole
    vocabulary, float32, and ids. Equal ones by token id."""
    logprobs, tokens = logits.double().log_softmax(-1).float().sort(dim=-1, descending=True, stable=True)
    return logprobs[..., :count], tokens[..., :count]
