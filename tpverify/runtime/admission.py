"""Who may start: prompts wait, in order of arrival, until the pool has room for them."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tpverify.errors import PoolFull
from tpverify.kv.log import KvLog
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.generation import Generation
from tpverify.runtime.messages import Ping

POLL_S = 0.05  # how long a waiting call takes to notice that the engine has ended, or a reader has gone


@dataclass(eq=False)
class Call:
    """Prompts that were asked for together, by index: those that wait, and those under way.

    caching: whether they may begin with rows of the prefix cache, and leave theirs there. blocked: the next prompt
    waits for slots. thread: the one that steps it.
    """

    waiting: list[tuple[int, Generation]]
    caching: bool
    active: dict[int, Generation] = field(default_factory=dict)
    blocked: bool = False
    thread: int = 0


class Admission:
    """Slots are promised to a sequence when it starts: the most that it can come to hold. So none runs out of slots on
    its way, and whatever else is in the cache can be evicted when it is needed.

    All but `leave` is called by whoever has the turn, an RLock. max_batch: sequences of a call. deadline_s: the longest
    wait.
    """

    def __init__(self, coordinator: Coordinator, turn: Any, max_batch: int, deadline_s: float) -> None:
        self._coordinator, self._max_batch, self._deadline_s = coordinator, max_batch, deadline_s
        self._freed = threading.Condition(turn)
        self._calls: list[Call] = []  # in order of arrival
        self._left: list[Call] = []  # nobody reads their results any longer; closed between two steps

    @property
    def _log(self) -> KvLog:
        return self._coordinator.log

    def admit(self, call: Call) -> None:
        """Start the call's prompts in order while there is a place in the batch and room in the pool. If none of them
        is under way, wait for room that calls of other threads make; PoolFull when there is none in time, or when those
        threads wait as well."""
        self.close_left()
        if call not in self._calls:
            self._calls.append(call)
        call.thread, end = threading.get_ident(), time.monotonic() + self._deadline_s
        while call.waiting and len(call.active) < self._max_batch:
            earlier = self._calls[: self._calls.index(call)]
            needed = self._needed(call)
            call.blocked = needed > self._room() or any(other.blocked for other in earlier)
            if not call.blocked:
                self._start(call)
            elif call.active:
                return
            else:
                self._wait(call, needed, end)
        call.blocked = False

    def close(self, call: Call, index: int) -> None:
        """End one of the call's sequences. What it has committed stays for later ones, while there is room."""
        generation = call.active.pop(index)
        committed = generation.committed(self._log.length(generation.seq))
        self._log.close(generation.seq, committed if call.caching else None)
        self._freed.notify_all()

    def leave(self, call: Call) -> None:
        """The call is over, whatever of it is under way. From any thread, at any moment: a garbage collector's too."""
        self._left.append(call)

    def close_left(self) -> None:
        while self._left:
            call = self._left.pop()
            for index in list(call.active):
                self.close(call, index)
            if call in self._calls:
                self._calls.remove(call)

    def _start(self, call: Call) -> None:
        index, generation = call.waiting.pop(0)
        seq = self._log.open(generation.prompt if call.caching else None)
        generation.begin(seq, self._log.length(seq))
        call.active[index] = generation

    def _needed(self, call: Call) -> int:
        """Slots that the call's next prompt may take of those that nobody reads."""
        generation = call.waiting[0][1]
        return generation.slots_needed - (self._log.shared(generation.prompt) if call.caching else 0)

    def _hopeless(self, call: Call) -> bool:
        """Whether what is under way is all for waiting threads to step, this one among them, and leaves no room for
        what waits first: nothing would ever end."""
        waiting = [other for other in self._calls if other.blocked and not other.active]
        stepped_by = {other.thread for other in self._calls if other.active}
        stuck = stepped_by <= {other.thread for other in waiting} and self._needed(waiting[0]) > self._room()
        return stuck and (call.thread in stepped_by or not stepped_by)

    def _room(self) -> int:
        """Slots that nobody has and nobody has been promised."""
        stats = self._log.stats()
        under_way = [generation for call in self._calls for generation in call.active.values()]
        promised = sum(generation.slots_needed - self._log.length(generation.seq) for generation in under_way)
        return stats["free"] + stats["evictable"] - promised

    def _wait(self, call: Call, needed: int, end: float) -> None:
        if self._log.stats()["quarantined"]:
            self._coordinator.step(Ping())  # slots that rows have moved out of are free soon
            return
        if time.monotonic() > end or self._hopeless(call):
            call.blocked = False
            stats = self._log.stats()
            others_text = f"{stats['sequences']} other sequences under way leave {self._room()}"
            raise PoolFull(
                f"a prompt may need {needed} slots, {others_text}",
                needed=needed,
                free=stats["free"],
                evictable=stats["evictable"],
            )
        self._freed.wait(POLL_S)
        self.close_left()
