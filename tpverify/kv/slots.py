"""Slots of the latent pool: what each one is doing, and which free ones are handed out next.

A tree has tens of slots, so what counts is numpy's cost a call: `take` and `put` instead of indexing, comparing bytes
instead of `.all()`, each about a third.
"""

import numpy as np
import numpy.typing as npt

from tpverify.config import check_int
from tpverify.errors import ArgumentError

Slots = npt.NDArray[np.int32]

# A slot is in exactly one state. SINK is slot 0: padding rows are written there and nothing reads it. The source of a
# move is QUARANTINED until no rank can still read it.
FREE, SCRATCH, LIVE, SINK, QUARANTINED = range(5)
NO_SLOTS: Slots = np.empty(0, np.int32)


class SlotStates:
    """Of every slot, arrays [num_slots]: its state, uint8; how many read it, sequences plus the cache, int32; whether
    the cache does, bool; while LIVE, its logical position, int32, and its owner, the sequence that committed it, int64;
    its generation, int64, which changes whenever the slot stops holding a row, so that (slot, generation) names a row
    for good.

    A transition checks the state it leaves before it changes anything: no slot is claimed twice or freed twice.
    Slots from `limit` on are not claimed.
    """

    def __init__(self, num_slots: int) -> None:
        self.limit = check_int("num_slots", num_slots, 2, 2**31 - 1)
        self.states = np.zeros(num_slots, np.uint8)
        self.states[0] = SINK
        self.readers = np.zeros(num_slots, np.int32)
        self.cached = np.zeros(num_slots, np.bool_)
        self.positions = np.zeros(num_slots, np.int32)
        self.owners = np.zeros(num_slots, np.int64)
        self.generations = np.zeros(num_slots, np.int64)
        self.generation = 0  # the last that was given
        self._ascending = np.arange(num_slots, dtype=np.int32)

    def check_free(self, slots: Slots, own: Slots) -> None:
        """ArgumentError unless the slots ascend, are below the limit and are FREE or among `own`, which is freed
        first."""
        if slots.size == 0 or slots[0] < 1 or slots[-1] >= self.limit or not (slots[1:] > slots[:-1]).all():
            raise ArgumentError("slots", f"ascending slots from 1 to {self.limit - 1}", slots)
        if not self._all(slots, FREE):
            busy = slots[self.states.take(slots) != FREE]
            if not np.isin(busy, own).all():
                raise ArgumentError("slots", "free slots", busy)

    def check_distinct(self, argument: str, slots: Slots, state: int, what: str) -> None:
        """ArgumentError unless the slots, in any order, are different slots of the pool in that state."""
        ascending = np.sort(slots)
        if slots.size == 0 or ascending[0] < 1 or ascending[-1] >= self.states.size or not np.diff(ascending).all():
            raise ArgumentError(argument, f"different slots from 1 to {self.states.size - 1}", slots)
        if not self._all(slots, state):
            raise ArgumentError(argument, what, slots[self.states.take(slots) != state])

    def claim(self, slots: Slots, state: int) -> None:
        """FREE -> SCRATCH, or LIVE with one reader."""
        assert self._all(slots, FREE)
        self.states.put(slots, state)
        self.readers.put(slots, int(state == LIVE))

    def settle(self, accepted: Slots, rejected: Slots) -> None:
        """The tree's end: accepted SCRATCH -> LIVE with one reader, rejected SCRATCH -> FREE."""
        assert self._all(accepted, SCRATCH) and self._all(rejected, SCRATCH)
        self.states.put(accepted, LIVE)
        self.readers.put(accepted, 1)
        self._vacate(rejected, FREE)

    def place(self, slots: Slots, owner: int, position: int) -> None:
        """LIVE slots hold positions position, position + 1, ... of what `owner` has committed."""
        self.owners.put(slots, owner)
        self.positions.put(slots, self._ascending[position : position + slots.size])

    def share(self, slots: Slots) -> None:
        """LIVE with one more reader."""
        assert self._all(slots, LIVE)
        self.readers[slots] += 1

    def release(self, slots: Slots) -> Slots:
        """LIVE with one reader fewer. Returns the slots whose last reader this was: they are FREE."""
        assert self._all(slots, LIVE)
        self.readers[slots] -= 1
        freed = slots[self.readers.take(slots) == 0]
        self._vacate(freed, FREE)
        return freed

    def move(self, src: Slots, dst: Slots) -> None:
        """Rows change slots: dst FREE -> LIVE with the readers and position of src, src LIVE -> QUARANTINED."""
        assert self._all(src, LIVE) and self._all(dst, FREE)
        self.states.put(dst, LIVE)
        for of_slot in (self.readers, self.cached, self.positions, self.owners):
            of_slot.put(dst, of_slot.take(src))
        self.readers.put(src, 0)
        self.cached.put(src, False)
        self._vacate(src, QUARANTINED)

    def retire(self, slots: Slots) -> None:
        """QUARANTINED -> FREE."""
        assert self._all(slots, QUARANTINED)
        self.states.put(slots, FREE)

    def free(self) -> Slots:
        """All slots that may be claimed, int32, ascending. O(num_slots)."""
        return np.flatnonzero(self.states[: self.limit] == FREE).astype(np.int32)

    def counts(self) -> dict[str, int]:
        """Slots that are free, scratch, live, quarantined and withheld (free, from the limit on), num_slots - 1 in all;
        of the live ones, those with several readers and those in the cache. Counted anew, so they cannot drift."""
        states = np.bincount(self.states, minlength=5)
        withheld = int(np.count_nonzero(self.states[self.limit :] == FREE))
        return {
            "free": int(states[FREE]) - withheld,
            "scratch": int(states[SCRATCH]),
            "live": int(states[LIVE]),
            "quarantined": int(states[QUARANTINED]),
            "withheld": withheld,
            "shared": int(np.count_nonzero(self.readers > 1)),
            "cached": int(np.count_nonzero(self.cached)),
        }

    def _vacate(self, slots: Slots, state: int) -> None:
        self.states.put(slots, state)
        self.generation += 1
        self.generations.put(slots, self.generation)

    def _all(self, slots: Slots, state: int) -> bool:
        return self.states.take(slots).tobytes() == bytes((state,)) * slots.size


class FreeSlots:
    """The coordinator's free list: an ascending part, and a stack of the slots given back since it was last sorted.

    Prompts take from the ascending part; trees, most of whose slots return a step later, live off the stack. So trees
    do not break up the ascending part and prompts stay in few extents (`bench/bench_kv.py` prints how few). The stack
    is merged in only when the ascending part runs short, so a slot is sorted about once a life.
    """

    def __init__(self, num_slots: int) -> None:
        self._ascending = np.arange(1, num_slots, dtype=np.int32)
        self._next = 0
        self._stack = np.empty(num_slots, np.int32)
        self._stacked = 0

    @property
    def count(self) -> int:
        """Slots that can be taken."""
        return self._ascending.size - self._next + self._stacked

    def take_run(self, n: int) -> Slots:
        """Remove n <= count slots for rows that stay: ascending, int32 [n], the next ones of the ascending part."""
        assert n <= self.count
        if n > self._ascending.size - self._next:
            self._ascending = np.sort(np.concatenate((self._ascending[self._next :], self._stack[: self._stacked])))
            self._next = self._stacked = 0
        start = self._next
        self._next = end = start + n
        return self._ascending[start:end]

    def take_recent(self, n: int) -> Slots:
        """Remove n <= count slots for rows that mostly return soon: ascending, int32 [n], those given back last."""
        if n > self._stacked:
            return self.take_run(n)
        self._stacked -= n
        return np.sort(self._stack[self._stacked : self._stacked + n])

    def reset(self, slots: Slots) -> None:
        """These, ascending, and no others."""
        self._ascending, self._next, self._stacked = slots, 0, 0

    def give(self, slots: Slots) -> None:
        """Add slots, int32, which the states say are free."""
        end = self._stacked + slots.size
        self._stack[self._stacked : end] = slots
        self._stacked = end
