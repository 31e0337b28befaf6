"""How a step's tables reach a GPU: packed into one host buffer that the GPU copies by itself, as one transfer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

RING_BUFFERS = 3  # steps that may be under way before one waits for the copy of an earlier one
SMALLEST = 1 << 12  # int32 values of a host buffer, which grows by doubling
GRAIN = SMALLEST  # int32 values that copies are multiples of


@dataclass(frozen=True)
class Request:
    """A checked request: prefix [S] and tree [n] slots, ancestor words uint64 [n, ceil(n/64)], depths int32 [n]."""

    prefix: Tensor | np.ndarray  # int64, or int32 as a replica has them
    tree: Tensor | np.ndarray
    words: np.ndarray
    depths: np.ndarray

    @property
    def nodes(self) -> int:
        return len(self.words)


class Cuts:
    """A tensor, and its beginnings of any length, each cut once: torch's code has left the caches since the step
    before, and a cut then takes tens of microseconds. `array` is what numpy sees of it, where it is on the CPU."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self._made = whole, dict[int, Tensor]()
        self.array = whole.numpy() if whole.is_cpu else np.empty(0, np.int32)

    def __getitem__(self, count: int) -> Tensor:
        cut = self._made.get(count)
        if cut is None:
            cut = self._made[count] = self.whole[:count]
        return cut


class StagingRing:
    """Host buffers, filled in turn. One is filled again only when the copy from it is done, which its event says.

    allocate(count): int32 [count] on the CPU, pinned by default. make_event: as torch.cuda.Event.
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor] = lambda count: torch.empty(count, dtype=torch.int32, pin_memory=True),
        make_event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._allocate = allocate
        self._copied = [make_event() for _ in range(RING_BUFFERS)]
        self._buffers = [Cuts(torch.empty(0, dtype=torch.int32)) for _ in range(RING_BUFFERS)]
        self._at = 0

    def take(self, count: int) -> np.ndarray:
        """int32 [count] to fill, then to `send`. Waits only while the copy from this buffer is under way."""
        self._copied[self._at].synchronize()
        if len(self._buffers[self._at].whole) < count:
            self._buffers[self._at] = Cuts(self._allocate(max(SMALLEST, 1 << (count - 1).bit_length())))
        return self._buffers[self._at].array[:count]

    def send(self, target: Tensor) -> None:
        """Enqueue the copy of what was taken last into target, int32 of as many elements, on the current stream."""
        target.copy_(self._buffers[self._at][len(target)], non_blocking=True)
        self._copied[self._at].record()
        self._at = (self._at + 1) % RING_BUFFERS


class RequestTables:
    """The tables of tpv_verify_requests in one int32 buffer of a fixed address: five counts a request, then all words,
    then all slots, with begins that count from the buffer's start."""

    def __init__(
        self, max_batch: int, max_nodes: int, max_tokens: int, device: torch.device, ring: StagingRing
    ) -> None:
        self._max_batch, self._ring = max_batch, ring
        self._first_word = -(-5 * max_batch // 2)  # words have 8 bytes
        words = max_batch * max_nodes * -(-max_nodes // 64)
        size = 2 * (self._first_word + words) + max_tokens + max_batch * max_nodes
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._cuts = Cuts(self._buffer)

    def pointers(self) -> list[int]:
        """Of slots, slot_begin, prefix_len, nodes, node_begin, word_begin, words."""
        base = self._buffer.data_ptr()
        return [base, *(base + 4 * row * self._max_batch for row in range(5)), base]

    def upload(self, requests: Sequence[Request]) -> None:
        """Replace the tables, in stream order. Slots on the CPU are part of the copy; those on the GPU stay there.

        This is on the way of every step: a few calls of numpy a request, the slots copied once, and lengths of copies
        that change rarely.
        """
        first_slot = 2 * (self._first_word + sum(request.words.size for request in requests))
        slot, node, word = first_slot, 0, self._first_word
        counts = []
        for request in requests:
            prefix, nodes = len(request.prefix), request.nodes
            counts.append((slot, prefix, nodes, node, word))
            slot, node, word = slot + prefix + nodes, node + nodes, word + request.words.size
        host = self._ring.take(min(-(-slot // GRAIN) * GRAIN, len(self._buffer)))
        table = host[: 5 * self._max_batch].reshape(5, -1)
        table[:, len(requests) :] = 0  # requests without nodes
        table[:, : len(requests)].T[:] = counts or np.empty((0, 5))
        there = []
        at, masks = first_slot, host[:first_slot].view(np.uint64)
        for request, (*_, word) in zip(requests, counts, strict=True):
            masks[word : word + request.words.size] = request.words.reshape(-1)
            for slots in (request.prefix, request.tree):
                part = slice(at, at := at + len(slots))
                if isinstance(slots, Tensor) and not slots.is_cpu:
                    there.append((part, slots))
                else:
                    host[part] = slots
        self._ring.send(self._cuts[len(host)])
        for part, slots in there:
            self._buffer[part] = slots
