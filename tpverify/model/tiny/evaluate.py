"""What the model is judged by: bits per byte on held-out modules, and accept lengths of real speculative decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.model.drafter import Drafter
from tpverify.model.tiny.corpus import Corpus, joined
from tpverify.model.tiny.target import Target
from tpverify.tree import DraftTree, accept_greedy, build_ddtree

BUDGETS = (8, 16, 32, 64, 128)
Strategy = Callable[[np.ndarray, int], DraftTree]  # drafter logits [15, vocab], root token -> tree


@torch.no_grad()
def bits_per_byte(target: Target, texts: dict[str, bytes], context: int, windows: int | None = None) -> float:
    """Mean over the joined documents, cut into windows side by side: a byte sees 1 to `context` bytes before it.

    windows: how many of them to take, evenly spread; all by default.
    """
    data = joined(texts, target.device).long()
    count = min(windows or len(data), (len(data) - 1) // context)
    starts = torch.arange(count, device=data.device)[:, None] * ((len(data) - 1) // context // count) * context
    total = 0.0
    for rows in starts.split(max(1, 65536 // context)):
        batch = data[rows + torch.arange(context + 1, device=data.device)]
        loss = F.cross_entropy(target(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        total += loss.item()
    return total / (count * context) / math.log(2)


def prompts(texts: dict[str, bytes], lengths: list[int]) -> list[bytes]:
    """One prompt a length, at line starts spread evenly over the documents; no randomness."""
    data = b"".join(texts.values())
    step = (len(data) - max(lengths)) // len(lengths)
    starts = [data.rindex(b"\n", 0, step * i + step // 2) + 1 for i in range(len(lengths))]
    return [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def held_out_prompts(corpus: Corpus, lengths: list[int]) -> list[bytes]:
    """A prompt a length from the held-out library modules, and as many from the tests if the library has them."""
    return [prompt for part in (corpus.lib, corpus.test) if part for prompt in prompts(part, lengths)]


def chain(logits: np.ndarray, root: int) -> DraftTree:
    return DraftTree.chain([root, *logits.argmax(-1).tolist()])


def ddtree(budget: int) -> Strategy:
    return lambda logits, root: build_ddtree(logits, root_token=root, budget=budget)


def root_only(logits: np.ndarray, root: int) -> DraftTree:
    return DraftTree.chain([root])


@dataclass(frozen=True)
class Decoded:
    """tokens: the new bytes of each prompt; tau: all of them over the rounds they took (the root of a round counts)."""

    tokens: list[list[int]]
    tau: float


@torch.no_grad()
def decode(
    target: Target, drafter: Drafter, given: list[bytes], new: int, strategy: Strategy, temperature: float = 0.0
) -> Decoded:
    """Continue every prompt by `new` bytes in rounds of draft, verify, commit, over a key-value cache and tree masks.

    With a temperature each position's choice comes from noise keyed by prompt and position, so all strategies emit one
    stream. A prompt leaves the count with its last round; bytes past `new` are cut and count for nothing.
    """
    device = target.device
    state = State(target, drafter, len(given), max(map(len, given)) + new + drafter.block_size)
    noise = torch.zeros(len(given), state.capacity + 1, target.config.vocab_size)
    if temperature > 0:
        uniform = torch.rand(noise.shape, generator=torch.Generator().manual_seed(0)).clamp_(1e-20, 1 - 1e-7)
        noise = -(-uniform.log()).log() * temperature
    noise = noise.to(device)

    def choices(trees: list[DraftTree]) -> np.ndarray:
        logits, positions = state.verify(trees)
        chosen = logits + noise[torch.arange(len(trees), device=device)[:, None], positions + 1]
        return chosen.argmax(-1).cpu().numpy()

    texts = [DraftTree.chain(list(prompt)) for prompt in given]
    chosen = choices(texts)
    state.commit([np.arange(len(text)) for text in texts])
    roots = [int(row[len(text) - 1]) for row, text in zip(chosen, texts, strict=True)]
    tokens: list[list[int]] = [[] for _ in given]
    rounds = 0
    while any(len(row) < new for row in tokens):
        drafts = state.draft(roots)
        active = [len(row) < new for row in tokens]
        trees = [(strategy if on else root_only)(d, r) for d, r, on in zip(drafts, roots, active, strict=True)]
        chosen = choices(trees)
        paths = []
        for i, tree in enumerate(trees):
            accepted = accept_greedy(tree, chosen[i, : len(tree)])
            paths.append(accepted.path if active[i] else accepted.path[:0])
            if active[i]:
                rounds += 1
                tokens[i] += tree.tokens[accepted.path].tolist()
                roots[i] = accepted.bonus
        state.commit(paths)
    return Decoded([row[:new] for row in tokens], len(given) * new / rounds)


class State:
    """Keys, values and drafter rows of a batch of sequences of different lengths."""

    def __init__(self, target: Target, drafter: Drafter, batch: int, capacity: int) -> None:
        self.target, self.drafter, self.capacity = target, drafter, capacity
        c, self.device = target.config, target.device
        shape = (c.num_hidden_layers, batch, capacity, c.num_attention_heads)
        self.keys = torch.zeros(*shape, c.qk_head_dim, device=self.device)
        self.values = torch.zeros(*shape, c.v_head_dim, device=self.device)
        self.context = torch.zeros(batch, capacity, drafter.context_dim, device=self.device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)

    def verify(self, trees: list[DraftTree]) -> tuple[Tensor, Tensor]:
        """Logits [b, n, vocab] and positions [b, n] of all nodes, padded to the widest tree; kept until `commit`."""
        n = max(map(len, trees))
        tokens, depths = np.zeros((2, len(trees), n), np.int64)
        own = np.tile(np.eye(n, dtype=bool), (len(trees), 1, 1))
        for i, tree in enumerate(trees):
            tokens[i, : len(tree)], depths[i, : len(tree)] = tree.tokens, tree.depths
            own[i, : len(tree), : len(tree)] = tree.ancestor_mask()
        width = int(self.lengths.max())
        past = torch.arange(width, device=self.device) < self.lengths[:, None]
        mask = torch.cat([past[:, None].expand(-1, n, -1), torch.from_numpy(own).to(self.device)], -1)[:, None]
        self.fresh: list[tuple[Tensor, Tensor]] = []

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.fresh.append((k.transpose(1, 2), v.transpose(1, 2)))
            keys = torch.cat([self.keys[index, :, :width].transpose(1, 2), k], 2)
            values = torch.cat([self.values[index, :, :width].transpose(1, 2), v], 2)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        positions = self.lengths[:, None] + torch.from_numpy(depths).to(self.device)
        streams = self.target.residuals(torch.from_numpy(tokens).to(self.device), positions, attend)
        features = self.target.features(streams, self.drafter.feature_layers)
        rows = self.drafter.context(features.flatten(0, 1), positions.flatten())
        self.rows = rows.unflatten(0, positions.shape)
        return self.target.head(streams[-1]), positions

    def commit(self, paths: list[np.ndarray]) -> None:
        """Append the nodes of each sequence's path."""
        sequence = torch.tensor([i for i, path in enumerate(paths) for _ in path], device=self.device)
        node = torch.tensor([int(j) for path in paths for j in path], device=self.device)
        order = torch.tensor([d for path in paths for d in range(len(path))], device=self.device)
        at = self.lengths[sequence] + order
        for index, (k, v) in enumerate(self.fresh):
            self.keys[index, sequence, at] = k[sequence, node]
            self.values[index, sequence, at] = v[sequence, node]
        self.context[sequence, at] = self.rows[sequence, node]
        self.lengths += torch.tensor([len(path) for path in paths], device=self.device)

    def draft(self, roots: list[int]) -> np.ndarray:
        """The drafter's logits [b, block_size - 1, vocab] after the given root tokens."""
        window = self.drafter.window
        first = (self.lengths - window).clamp(min=0)
        at = (first[:, None] + torch.arange(window, device=self.device)).clamp(max=self.capacity - 1)
        rows = self.context.gather(1, at[:, :, None].expand(-1, -1, self.context.shape[-1]))
        tokens = torch.tensor(roots, device=self.device)
        return self.drafter.draft(rows, self.lengths - first, tokens, self.lengths).cpu().numpy()
