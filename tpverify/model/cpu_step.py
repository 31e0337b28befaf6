"""The forward pass of a decode step on a CPU rank, recorded: one native call between two collectives.

On cores that eight ranks share, what a rank runs has left the caches since its last turn, and its Python and torch's
dispatch cost more than most layers compute. So they run once for each list of trees' sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpverify.model.decoder import Decoder
from tpverify.ops import dense
from tpverify.ops.host import Attention
from tpverify.tree import DraftTree

RECORDED_NODES = 160  # of steps with more the arithmetic counts, and the memory that a recording keeps
KEPT = 8  # recordings


class Target(NamedTuple):
    """A decoder, and where its steps leave what they find. All float32.

    pool [layers, slots, row_dim]; hidden [slots, hidden] and features [slots, len(layers) * hidden] take, by slot, what
    Decoder.__call__ returns for `layers`.
    """

    decoder: Decoder
    pool: Tensor
    hidden: Tensor
    features: Tensor | None
    layers: Sequence[int]


class CpuSteps:
    """Decode steps by the host library."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._recorded: dict[tuple[int, ...], CpuStep] = {}  # the latest last

    def __call__(self, trees: Sequence[DraftTree], prefixes: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Slots int64: of the committed tokens, and of each tree's nodes."""
        sizes = tuple(map(len, trees))
        step = self._recorded.pop(sizes, None) or CpuStep(self._target, sizes)
        step.take(trees, prefixes, slots)
        if sum(sizes) > RECORDED_NODES:
            step.run()
            return
        step.replay()
        self._recorded[sizes] = step
        if len(self._recorded) > KEPT:
            del self._recorded[next(iter(self._recorded))]


class CpuStep:
    """Those whose requests have sizes[0], sizes[1], ... nodes."""

    def __init__(self, target: Target, sizes: Sequence[int]) -> None:
        decoder, config, n = target.decoder, target.decoder.config, sum(sizes)
        heads = config.num_attention_heads // decoder.group.size
        self._target, self._sizes, self._own = target, list(sizes), decoder.group.own(n)
        self._x = torch.empty(self._own.stop - self._own.start, config.hidden_size)
        self._angles = torch.empty(n, config.qk_rope_head_dim // 2), torch.empty(n, config.qk_rope_head_dim // 2)
        self._slots = torch.empty(n, dtype=torch.int64)
        self._out, self._lse = torch.empty(n, heads, config.kv_lora_rank), torch.empty(n, heads)
        self._requests = [Attention(size, heads, config.softmax_scale) for size in sizes]
        self._recording: dense.Recording | None = None

    def take(self, trees: Sequence[DraftTree], prefixes: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        for request, tree, prefix, own in zip(self._requests, trees, prefixes, slots, strict=True):
            request.take(prefix, own, tree.ancestor_words(), tree.depths)
        tokens = np.concatenate([tree.tokens for tree in trees])
        positions = np.concatenate([t.positions(len(p)) for t, p in zip(trees, prefixes, strict=True)])
        torch.cat(list(slots), out=self._slots)
        decoder, at = self._target.decoder, torch.from_numpy(positions)
        torch.index_select(decoder.embed, 0, torch.from_numpy(tokens)[self._own], out=self._x)
        torch.index_select(decoder.rope.cos, 0, at, out=self._angles[0])
        torch.index_select(decoder.rope.sin, 0, at, out=self._angles[1])

    def replay(self) -> None:
        if self._recording is None:
            self._recording = dense.Recording(self.run)
        else:
            self._recording.replay()

    def run(self) -> None:
        target, hidden = self._target, self._target.hidden.shape[1]
        states = target.decoder.forward(self._x, self._angles, self._attend, target.layers)
        dense.place(states[:, -hidden:], target.hidden, self._slots)
        if target.features is not None:
            dense.place(states[:, :-hidden], target.features, self._slots)

    def _attend(self, layer: int, latents: Tensor, q: Tensor) -> Tensor:
        pool = self._target.pool[layer]
        dense.place(latents, pool, self._slots)
        parts = zip(*(x.split_with_sizes(self._sizes) for x in (q, self._out, self._lse)), strict=True)
        for request, (queries, out, lse) in zip(self._requests, parts, strict=True):
            request(queries, pool, out, lse)
        return self._out
