"""Slots of the latent pool: what each one is doing, and which free ones are handed out next.

A tree has tens of slots, so what counts is numpy's cost a call: `take` and `put` instead of indexing, comparing bytes
instead of `.all()`, each about a third.
"""

import numpy as np
import numpy.typing as npt

from tpverify.config import check_range
from tpverify.errors import ArgumentError

Slots = npt.NDArray[np.int32]

# A slot is in exactly one state. SINK is slot 0: padding rows are written there and nothing reads it.
FREE, SCRATCH, LIVE, SINK = range(4)
NO_SLOTS: Slots = np.empty(0, np.int32)


class SlotStates:
    """Of every slot: its state, uint8 [num_slots], and the number of sequences that read it, int32 [num_slots].

    A transition checks the state it leaves before it changes anything: no slot is claimed twice or freed twice.
    """

    def __init__(self, num_slots: int) -> None:
        check_range("num_slots", num_slots, 2, 2**31 - 1)
        self.states = np.zeros(num_slots, np.uint8)
        self.states[0] = SINK
        self.readers = np.zeros(num_slots, np.int32)

    def check_free(self, slots: Slots, own: Slots) -> None:
        """ArgumentError unless the slots ascend, are in the pool and are FREE or among `own`, which is freed first."""
        if slots.size == 0 or slots[0] < 1 or slots[-1] >= self.states.size or not (slots[1:] > slots[:-1]).all():
            raise ArgumentError("slots", f"ascending slots from 1 to {self.states.size - 1}", slots)
        if not self._all(slots, FREE):
            busy = slots[self.states.take(slots) != FREE]
            if not np.isin(busy, own).all():
                raise ArgumentError("slots", "free slots", busy)

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
        self.states.put(rejected, FREE)

    def share(self, slots: Slots) -> None:
        """LIVE with one more reader."""
        assert self._all(slots, LIVE)
        self.readers[slots] += 1

    def release(self, slots: Slots) -> Slots:
        """LIVE with one reader fewer. Returns the slots whose last reader this was: they are FREE."""
        assert self._all(slots, LIVE)
        self.readers[slots] -= 1
        freed = slots[self.readers.take(slots) == 0]
        self.states.put(freed, FREE)
        return freed

    def counts(self) -> dict[str, int]:
        """Slots that are free, scratch, live, and live with several readers; counted anew, so they cannot drift."""
        free, scratch, live = (int(np.count_nonzero(self.states == state)) for state in (FREE, SCRATCH, LIVE))
        return {"free": free, "scratch": scratch, "live": live, "shared": int(np.count_nonzero(self.readers > 1))}

    def _all(self, slots: Slots, state: int) -> bool:
        return self.states.take(slots).tobytes() == bytes((state,)) * slots.size


class FreeSlots:
    """The coordinator's free list: `take` hands out ascending slots, `give` takes slots back in any order.

    Slots are taken from a sorted list and given back to an unsorted one; the two are merged only when the first runs
    short. Runs stay several times longer than first-in first-out leaves them, and a slot is sorted about once a life
    (the lazy sort of SGLang's page-1 allocator).
    """

    def __init__(self, num_slots: int) -> None:
        self._sorted = np.arange(1, num_slots, dtype=np.int32)
        self._next = 0
        self._returned = np.empty(num_slots, np.int32)
        self._num_returned = 0

    @property
    def count(self) -> int:
        """Slots that can be taken."""
        return self._sorted.size - self._next + self._num_returned

    def take(self, n: int) -> Slots:
        """Remove n slots, ascending, int32 [n]; n <= count."""
        assert n <= self.count
        if n > self._sorted.size - self._next:
            self._sorted = np.sort(np.concatenate((self._sorted[self._next :], self._returned[: self._num_returned])))
            self._next = self._num_returned = 0
        start = self._next
        self._next = end = start + n
        return self._sorted[start:end]

    def give(self, slots: Slots) -> None:
        """Add slots, int32, which the states say are free."""
        end = self._num_returned + slots.size
        self._returned[self._num_returned : end] = slots
        self._num_returned = end
