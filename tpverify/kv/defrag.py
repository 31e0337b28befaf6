"""Where rows ought to lie, and the waves of moves that bring them there.

A chain is a list of slots in position order with one owner: rows of the prefix cache, or what a sequence has committed
itself. A plan gives a chain a window, an interval of the pool as long as it, without slots that must stay. Moves are
evacuate-only: a destination is free when the wave is made, and a source is not reused before the next one. So moves
of a wave are independent, and old and new rows are both valid until it is over.
"""

from collections.abc import Sequence as Listlike
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tpverify.kv import extents
from tpverify.kv.slots import FREE, LIVE, NO_SLOTS, Slots, SlotStates

Mask = npt.NDArray[np.bool_]

GOAL = 4  # extents that a chain may be left with when there is no room, or no need, for fewer
LONG = 16  # rows: so long an extent never steps aside for another chain
CHAINS_AT_ONCE = 256  # of one job, so that planning stays short


@dataclass
class Job:
    """Rows on their way: row i is at slots[i], was put there as generations[i], and belongs at targets[i]. `windows`
    are all slots that the job needs for itself; nobody else may get them while it lasts."""

    slots: Slots
    targets: Slots
    generations: npt.NDArray[np.int64]
    windows: Mask

    def wave(self, states: SlotStates, pinned: Mask, limit: int) -> tuple[Slots, Slots]:
        """Sources and destinations of at most `limit` moves that can be made now; none when the job is over.

        A row whose place is free goes there. Only when there is none, the occupants of the first places step aside, to
        the highest free slots outside the windows.
        """
        self._forget(states)
        moves = np.flatnonzero((states.states.take(self.targets) == FREE) & ~pinned.take(self.slots))[:limit]
        if moves.size:
            src, dst = self.slots.take(moves), self.targets.take(moves)
        else:
            occupants = self.targets[(states.states.take(self.targets) == LIVE) & ~pinned.take(self.targets)]
            free = states.free()
            outside = free[~self.windows.take(free)]
            count = min(limit, occupants.size, outside.size)
            src, dst = np.sort(occupants[:count]), outside[outside.size - count :]
            moves = np.flatnonzero(np.isin(self.slots, src))
        self._follow(states, moves, src, dst)
        return src, dst

    def _forget(self, states: SlotStates) -> None:
        """Rows that are where they belong, and those that have gone: their slot has another generation."""
        alive = states.generations.take(self.slots) == self.generations
        keep = np.flatnonzero(alive & (self.slots != self.targets))
        self.slots, self.targets = self.slots.take(keep), self.targets.take(keep)
        self.generations = self.generations.take(keep)

    def _follow(self, states: SlotStates, moves: npt.NDArray[np.intp], src: Slots, dst: Slots) -> None:
        """Those of the job's rows that this wave moves are at their new slots."""
        place = np.zeros(states.states.size, np.int32)
        place.put(src, dst)
        moved = place.take(self.slots.take(moves))
        self.slots.put(moves, moved)
        self.generations.put(moves, states.generations.take(moved))


class Extent(NamedTuple):
    """Its first row in a layout, that row's slot, and how many rows."""

    row: int
    slot: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Chains one after another: slots int32 [rows]; chain c has rows bounds[c] to bounds[c + 1] - 1 and counts[c]
    extents; extent e has lengths[e] rows from row begins[e]."""

    slots: Slots
    bounds: npt.NDArray[np.intp]
    counts: npt.NDArray[np.intp]
    begins: npt.NDArray[np.intp]
    lengths: npt.NDArray[np.intp]

    @classmethod
    def of(cls, chains: Listlike[Slots]) -> "Layout":
        bounds = np.cumsum([0, *(chain.size for chain in chains)])
        slots = np.concatenate([NO_SLOTS, *chains])
        mask = extents.begins(slots)
        mask[bounds[:-1]] = True
        begins = np.flatnonzero(mask)
        counts = np.diff(np.searchsorted(begins, bounds))
        return cls(slots, bounds, counts, begins, np.diff(begins, append=slots.size))

    def extents(self, start: int, end: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """First rows and lengths of the extents of rows start to end - 1, which is where an extent begins or ends."""
        part = slice(*np.searchsorted(self.begins, (start, end)))
        return self.begins[part], self.lengths[part]

    def longest(self, start: int, end: int) -> tuple[Extent, int]:
        """The longest extent of rows start to end - 1, and how many extents they have."""
        begins, lengths = self.extents(start, end)
        longest = int(np.argmax(lengths))
        row = int(begins[longest])
        return Extent(row, int(self.slots[row]), int(lengths[longest])), begins.size


def plan(
    chains: Listlike[Slots], states: SlotStates, pinned: Mask, *, goal: int, threshold: int, most: int
) -> Job | None:
    """A job that leaves chains with `goal` extents, or up to GOAL where there is no room for fewer; None if there is
    nothing to do.

    Considered are chains of more than `threshold` >= goal extents without a pinned slot; those that lose most extents
    a row come first, until the job has `most` rows or more. With a goal above 1 the longest extents stay.
    """
    layout = Layout.of([chain for chain in chains if chain.size])
    if not layout.slots.size:
        return None
    counts, sizes = layout.counts, np.diff(layout.bounds)
    movable = counts > threshold
    if pinned.any():
        movable &= ~np.logical_or.reduceat(pinned.take(layout.slots), layout.bounds[:-1])
    candidates = np.flatnonzero(movable)
    candidates = candidates[np.argsort(-counts[candidates] / sizes[candidates], kind="stable")]
    # First windows of free slots alone. Where only extents of a single row step aside, nobody gets more of them.
    for long in (0, LONG, 2):
        gaps = _Gaps(_open(layout, movable, states, long), long)
        placed = _place(layout, candidates[:CHAINS_AT_ONCE].tolist(), gaps, goal, most)
        if placed:
            slots = np.concatenate([layout.slots[start:end] for start, end, _ in placed])
            targets = np.concatenate([window for _, _, window in placed])
            windows = np.zeros(states.states.size, np.bool_)
            windows[targets] = True
            if _gain(layout, placed) > _harm(layout, slots, windows):
                return Job(slots, targets, states.generations.take(slots), windows)
    return None


def _place(layout: Layout, chains: Listlike[int], gaps: "_Gaps", goal: int, most: int) -> list[tuple[int, int, Slots]]:
    """Rows start to end - 1 of the layout, and the window that they get."""
    placed = []
    rows = 0
    for chain in chains:
        segments, spare = _segments(layout, chain, goal)
        for start, end in segments:
            extent, count = layout.longest(start, end)
            stays = 2 * extent.size >= end - start
            window = gaps.around(extent, start, end) if stays else None
            if window is None and not (stays and gaps.long == 0):
                window = gaps.first_fit(end - start, min(1 + spare, count - 1) if gaps.long else 1)
            if window is not None:
                placed.append((start, end, window))
                rows += end - start
        if rows >= most:
            break
    return placed


def _gain(layout: Layout, placed: Listlike[tuple[int, int, Slots]]) -> int:
    """How many extents the job does away with."""
    return sum(layout.extents(start, end)[0].size - extents.count(window) for start, end, window in placed)


def _harm(layout: Layout, slots: Slots, windows: Mask) -> int:
    """How many it may add, at most: each row of another chain that it puts aside may become an extent of its own, and
    what is left of that extent may be in two."""
    aside = windows.copy()
    aside[slots] = False
    if not aside.take(layout.slots).any():
        return 0
    rows = np.add.reduceat(aside.take(layout.slots), layout.begins, dtype=np.intp)
    torn = rows[rows > 0]
    return int(torn.sum()) + torn.size - 2 * int(np.count_nonzero(torn == layout.lengths[rows > 0]))


def _segments(layout: Layout, chain: int, goal: int) -> tuple[list[tuple[int, int]], int]:
    """Parts of a chain, first row and end, that are to become one extent each while the rest stays where it is; and how
    many extents fewer than GOAL the chain has then. Moves as few rows as can be."""
    start, end = layout.bounds[chain : chain + 2].tolist()
    if goal == 1:
        return [(start, end)], GOAL - 1
    begin, length = layout.extents(start, end)
    longest = np.flatnonzero(length >= LONG)
    longest = np.sort(longest[np.argsort(-length[longest], kind="stable")[: goal - 1]]).tolist()
    best: tuple[int, int, list[tuple[int, int]]] = (end - start, 1, [(start, end)])
    for stay in (stay for n in range(1, goal) for stay in combinations(longest, n)):
        edges = [start, *(edge for e in stay for edge in (begin[e], begin[e] + length[e])), end]
        parts = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        torn = [(a, b) for a, b in parts if layout.extents(a, b)[0].size > 1]
        moved = sum(b - a for a, b in torn)
        if len(stay) + len(parts) <= goal and moved < best[0]:
            best = moved, len(stay) + len(parts), torn
    return best[2], GOAL - best[1]


class _Gaps:
    """Intervals of the pool that windows may cover, starts[i] to ends[i] - 1, ascending."""

    def __init__(self, open_: Mask, long: int) -> None:
        self.long = long
        edges = np.flatnonzero(np.diff(open_, prepend=False, append=False))
        self._starts, self._ends = edges[::2], edges[1::2]
        self._largest = int((self._ends - self._starts).max(initial=0))  # and none gets larger

    def around(self, extent: Extent, start: int, end: int) -> Slots | None:
        """A window for rows start to end - 1 in which one of their extents stays where it is."""
        low = extent.slot - extent.row + start
        high = low + end - start
        if extent.size >= self.long:
            fits = self._is_open(low, extent.slot) and self._is_open(extent.slot + extent.size, high)
        else:
            fits = self._is_open(low, high)
        return self._take(low, high) if fits else None

    def first_fit(self, size: int, pieces: int) -> Slots | None:
        """A window of `size` slots in the first gap that has room; else in up to `pieces` of equal size."""
        for count in range(1, pieces + 1):
            part = -(-size // count)
            if part <= self._largest and ((self._ends - self._starts) // part).sum() >= count:
                return np.concatenate([self._first(min(part, size - i * part)) for i in range(count)])
        return None

    def _first(self, size: int) -> Slots:
        low = int(self._starts[np.argmax(self._ends - self._starts >= size)])
        return self._take(low, low + size)

    def _is_open(self, low: int, high: int) -> bool:
        if low >= high:
            return True
        gap = int(np.searchsorted(self._starts, low, side="right")) - 1
        return gap >= 0 and high <= self._ends[gap]

    def _take(self, low: int, high: int) -> Slots:
        """Close the interval, whatever of it is open, and return its slots."""
        i, j = int(np.searchsorted(self._ends, low, side="right")), int(np.searchsorted(self._starts, high))
        if i < j:
            starts, ends = [min(self._starts[i], low), high], [low, max(self._ends[j - 1], high)]
            self._starts = np.concatenate((self._starts[:i], starts, self._starts[j:]))
            self._ends = np.concatenate((self._ends[:i], ends, self._ends[j:]))
        return np.arange(low, high, dtype=np.int32)


def _open(layout: Layout, movable: Mask, states: SlotStates, long: int) -> Mask:
    """Slots that a window may cover: the free ones, and those of extents shorter than `long`."""
    open_ = states.states == FREE
    open_[states.limit :] = False
    scattered = (layout.lengths < long) & np.repeat(movable, layout.counts)
    if scattered.any():
        open_[layout.slots[np.repeat(scattered, layout.lengths)]] = True
    return open_


def evacuate(chains: Listlike[Slots], states: SlotStates, pinned: Mask) -> tuple[Slots, Slots]:
    """Moves of the rows above the limit, chain after chain, into what is free below, the longest runs first: as many as
    can be made now."""
    slots = np.concatenate([NO_SLOTS, *chains])
    src = slots[(slots >= states.limit) & ~pinned.take(slots)]
    free = states.free()
    first = np.flatnonzero(extents.begins(free))
    lengths = np.diff(first, append=free.size)
    order = np.argsort(-lengths, kind="stable")
    order = order[: int(np.searchsorted(np.cumsum(lengths[order]), src.size)) + 1]
    dst = np.concatenate([NO_SLOTS, *(free[first[run] : first[run] + lengths[run]] for run in order)])[: src.size]
    return src[: dst.size], dst
