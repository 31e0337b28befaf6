"""How a step's tables reach a GPU: written to page-locked memory of the host, from where it fetches them itself."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpverify.errors import ArgumentError

RING_BUFFERS = 8  # updates that may be under way before one waits for an earlier one's tables to be fetched
SMALLEST = 1 << 12  # int32 values of a host buffer, which grows by doubling
VECTOR = 4  # int32 values that are fetched at once

Allocate = Callable[[int], Tensor]  # int32 [count] on the CPU


def page_locked(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, pin_memory=True)


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


class Staged:
    """Values on the host. `source`, of a fixed address, says to whoever fetches where they lie and how many there are:
    a tpv_fetch_source. Nothing may change while a fetch is under way."""

    def __init__(self, allocate: Allocate = page_locked) -> None:
        self._allocate, self._whole = allocate, allocate(0)
        self._head = allocate(4)
        self.source = self._head.data_ptr()
        self._place = self._head.numpy().view(np.int64)
        self._values = self._whole.numpy()

    def room(self, count: int) -> np.ndarray:
        """int32 [count] to fill."""
        if len(self._values) < count:
            self._whole = self._allocate(max(SMALLEST, 1 << (count - 1).bit_length()))
            self._values = self._whole.numpy()
            self._place[0] = self._whole.data_ptr()
        self._place[1] = -(-count // VECTOR)
        return self._values[:count]


class StagingRing:
    """Host buffers, filled in turn. One is filled again only when it has been fetched, which its event says. So a ring
    has to outlive its fetches: it serves all plans of its device.

    make_event: as torch.cuda.Event.
    """

    def __init__(self, allocate: Allocate = page_locked, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._buffers = [Staged(allocate) for _ in range(RING_BUFFERS)]
        self._fetched = [make_event() for _ in range(RING_BUFFERS)]
        self._at, self._lock = 0, threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[Staged]:
        """The next buffer, to fill and to enqueue the fetch of on the current stream. Waits only while what was in it
        before is being fetched."""
        with self._lock:
            at, self._at = self._at, (self._at + 1) % RING_BUFFERS
            self._fetched[at].synchronize()
            try:
                yield self._buffers[at]
            finally:  # what fails may have enqueued it
                self._fetched[at].record()


class RequestTables:
    """The tables of tpv_verify_requests in one int32 buffer of a fixed address: the rows of the tile that splits are
    chosen for, five counts a request, then all words, then all slots, with begins that count from the buffer's start.
    """

    def __init__(self, max_batch: int, max_nodes: int, max_tokens: int, device: torch.device) -> None:
        self._max_batch = max_batch
        self._first_word = -(-(1 + 5 * max_batch) // 2)  # words have 8 bytes
        words = max_batch * max_nodes * -(-max_nodes // 64)
        size = 2 * (self._first_word + words) + max_tokens + max_batch * max_nodes
        self.buffer = torch.zeros(-(-size // VECTOR) * VECTOR, dtype=torch.int32, device=device)
        self.split_tile_rows = self.buffer.data_ptr()

    def pointers(self) -> list[int]:
        """Of slots, slot_begin, prefix_len, nodes, node_begin, word_begin, words."""
        base = self.buffer.data_ptr()
        return [base, *(base + 4 * (1 + row * self._max_batch) for row in range(5)), base]

    def write(self, staged: Staged, requests: Sequence[Request], split_tile_rows: int) -> list[tuple[slice, Tensor]]:
        """Fill `staged`, to be fetched into `buffer`. Returns where in the buffer slots belong that are on the GPU.
        Raises ArgumentError, and leaves `staged` as it is, for requests beyond the tables' limits.

        This is on the way of every step: a few calls of numpy and none of torch, for slots in numpy's hands.
        """
        slot = 2 * (self._first_word + sum(request.words.size for request in requests))
        node, word = 0, self._first_word
        rows: list[tuple[int, ...]] = []
        words, slots, there = [], [], []
        for request in requests:
            prefix, nodes = len(request.prefix), request.nodes
            rows.append((slot, prefix, nodes, node, word))
            for part in (request.prefix, request.tree):
                if isinstance(part, Tensor) and not part.is_cpu:
                    there.append((slice(slot, slot + len(part)), part))
                    part = np.empty(len(part), np.int32)
                slots.append(part)
                slot += len(part)
            words.append(np.ascontiguousarray(request.words, np.uint64).reshape(-1).view(np.int32))
            node, word = node + nodes, word + request.words.size
        if len(requests) > self._max_batch or slot > len(self.buffer):
            limits = f"at most {self._max_batch}, with tables of {len(self.buffer)} values"
            raise ArgumentError("requests", limits, f"{len(requests)}, with {slot}")
        rows += [(0,) * 5] * (self._max_batch - len(requests))  # requests without nodes
        counts = [split_tile_rows, *(count for column in zip(*rows, strict=True) for count in column)]
        counts += [0] * (len(counts) % 2)
        np.concatenate([np.array(counts, np.int32), *words, *slots], out=staged.room(slot), casting="unsafe")
        return there
