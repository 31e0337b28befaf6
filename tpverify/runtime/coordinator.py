"""The one writer of the log: numbers the steps, sends the pending entries along, compares the digests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tpverify.config import check_int, check_type
from tpverify.errors import ClusterError, PoolFull, RankFailure
from tpverify.kv import extents
from tpverify.kv.defrag import GOAL
from tpverify.kv.digest import outlier
from tpverify.kv.log import KvLog, Move, Moved
from tpverify.kv.pacer import Pacer
from tpverify.kv.slots import LIVE, NO_SLOTS, Slots
from tpverify.runtime.messages import Configure, Frame, Ping, RowHashes, Step, Work, Write
from tpverify.runtime.ranks import START_DEADLINE_S, Answer, RankGroup, meeting
from tpverify.runtime.recovery import Recovered, Recovery, checked_restarts, require_tables

SCATTERED = 16  # extents: a chain of more is brought together by itself, to GOAL or fewer
ROWS_AT_ONCE = 4096  # of a wave of moves that nobody asked for

Result = TypeVar("Result")


class Coordinator:
    """Drives ranks 0..tp-1 of a group through `log`, a KvLog whose changes ride on the next step.

    Scattered rows are brought together between steps, when `pacer` allows it. No output changes by a bit.

    kind, options: the workers that the ranks build, see rank.WORKERS. Building a coordinator resets those ranks, and
    ends an earlier one on the same group. max_restarts: how many ranks that die or hang are replaced, see recovery.py,
    before the next one is the end. One thread at a time.
    """

    def __init__(
        self,
        group: RankGroup,
        kind: str,
        options: dict[str, Any],
        *,
        num_slots: int,
        max_sequences: int = 4096,
        tp: int | None = None,
        max_restarts: int = 0,
    ) -> None:
        check_type("group", group, RankGroup, "a RankGroup")
        max_restarts = checked_restarts(max_restarts)
        self.group = group
        self.tp = group.size if tp is None else check_int("tp", tp, 1, group.size)
        self._log, self._num_slots = KvLog(num_slots, max_sequences), num_slots
        self.steps = 0
        self.pacer, self.moves = Pacer(), 0
        self._wave: tuple[Moved, float] | None = None  # that the next step carries, and the seconds its plan took
        self._answered = ""
        group.coordinator = self
        with group.closed_by_failure(), meeting() as rendezvous:
            configure = Configure(self.tp, num_slots, kind, options, rendezvous, group.generation)
            self._recovery = Recovery(group, configure, self._log, 0)
            self._step(configure, (), None, START_DEADLINE_S)
        self._recovery = Recovery(group, configure, self._log, max_restarts)

    @property
    def live(self) -> bool:
        """Whether the ranks follow this log: false once it or its group is closed, or a later one has taken over."""
        return not self.group.closed and self.group.coordinator is self

    @property
    def log(self) -> KvLog:
        """Raises ClusterError when no rank follows it any longer: a closed runtime changes nothing."""
        if not self.live:
            self.group.require_open()
            raise ClusterError("this runtime has ended: it was closed, or another one has taken over its ranks")
        return self._log

    @property
    def recovered(self) -> list[Recovered]:
        """What was lost and replaced so far, in order."""
        return self._recovery.done

    @property
    def recovering(self) -> float:
        """Seconds that this has taken."""
        return sum(sum(recovered.seconds.values()) for recovered in self._recovery.done)

    def stats(self) -> dict[str, Any]:
        """The log's counts, `steps` sent, `moves`, the rows moved by themselves, and `recoveries`, see Recovered; after
        the end too."""
        recoveries = [asdict(recovered) for recovered in self.recovered]
        return self._log.stats() | {"steps": self.steps, "moves": self.moves, "recoveries": recoveries}

    def close(self) -> None:
        """End this coordinator; the group stays as it is."""
        if self.group.coordinator is self:
            self.group.coordinator = None

    def step(
        self, work: Work, frames: Sequence[Frame] = (), own: Sequence[Sequence[Frame]] | None = None
    ) -> list[Answer]:
        """Apply the pending log entries on every rank, then do `work` there. Returns the answers in rank order.

        frames go to every rank, then own[rank] to that rank alone. Raises RankFailure if a rank fails, dies or is late,
        if its tables differ from the log's, or if what it moved is not what the others did; the group is closed then.
        """
        start = time.perf_counter() - self.recovering
        answers = self._step(work, frames, own, None)
        self._pace(
            time.perf_counter() - self.recovering - start, max(answer.reply.seconds["move"] for answer in answers)
        )
        if not isinstance(work, Ping | Write) and self.pacer.due():  # further rows may be committed and not yet written
            self._defrag()
        return answers

    def reserve(self, change: Callable[[], Result]) -> Result:
        """change(), which takes slots of the log. In a full pool it is tried again when slots that rows have moved out
        of are free."""
        try:
            return change()
        except PoolFull:
            if not self.log.stats()["quarantined"]:
                raise
        while self.log.stats()["quarantined"]:
            self.step(Ping())
        return change()

    def digests(self) -> dict[str | int, str]:
        """Structural digests: of the log as "driver", and of every rank by number."""
        answers = self.step(Ping())
        return {"driver": self._answered} | {answer.reply.rank: answer.reply.digest for answer in answers}

    def check_content(self) -> int:
        """Compare what ranks hold at every committed position, the cache's included: rows compared, each once however
        many sequences read it. Raises RankFailure, after closing the group, for a rank that holds something else, with
        the first position of a sequence at which it does."""
        self.step(Ping())  # with what is pending
        return self._compare(np.arange(self._num_slots, dtype=np.int32))

    def _compare(self, slots: Slots) -> int:
        """check_content of those of the slots, int32 [n], that hold a committed position."""
        states, _ = self.log.slot_map()
        slots = slots[states.take(slots) == LIVE]
        parts = [np.empty((self.tp, 0), np.uint64)]
        for first in range(0, slots.size, ROWS_AT_ONCE):
            answers = self._step(RowHashes(extents.pack(slots[first : first + ROWS_AT_ONCE])), (), None, None)
            parts.append(np.stack([np.frombuffer(answer.result(), "<u8") for answer in answers]))
        hashes = np.concatenate(parts, axis=1)
        differs = (hashes != hashes[0]).any(axis=0)
        if differs.any():
            raise self._diverged(slots[differs], hashes[:, differs])
        return slots.size

    def _diverged(self, slots: Slots, hashes: npt.NDArray[np.uint64]) -> RankFailure:
        """Of the rows in these slots, int32 [n], the ranks' hashes [tp, n] differ."""
        column, place = 0, f"a cached row in slot {slots[0]}"
        for seq in self.log.extents():
            prefix = self.log.prefix_slots(seq)
            hits = np.flatnonzero(np.isin(prefix, slots))
            if hits.size:
                column = int(np.flatnonzero(slots == prefix[hits[0]])[0])
                place = f"sequence {seq} at position {hits[0]}"
                break
        rank, others, known = outlier(hashes[:, column].tolist())
        doubt = "" if known else ", and no majority says which of them is right"
        cause = f"its rows differ from those of rank {', '.join(map(str, others))}: {place}{doubt}"
        return self.group.fail(rank, self.steps, cause)

    def _pace(self, seconds: float, moving: float) -> None:
        """After a step of so many seconds, `moving` of them for the wave that it carried."""
        if self._wave is not None:
            moved, planning = self._wave
            self.pacer.ran(planning + moving, moved.moves, moved.done)
            self._wave = None
        self.pacer.step(seconds - moving)

    def _defrag(self) -> None:
        start = time.perf_counter()
        moved = self._log.defrag(ROWS_AT_ONCE, goal=min(GOAL, SCATTERED), threshold=SCATTERED)
        self._wave = moved, time.perf_counter() - start
        self.moves += moved.moves

    def _step(
        self, work: Work, frames: Sequence[Frame], own: Sequence[Sequence[Frame]] | None, deadline_s: float | None
    ) -> list[Answer]:
        first, entries = self.log.pending()
        self.steps += 1
        step = Step(self.steps, first, entries, work)
        with self.group.closed_by_failure():
            answers, recovered = self._recovery.step(step, frames, own, deadline_s)
            self._answered = self._log.digest()  # before the acknowledgement, which may add an entry
            require_tables(enumerate(answer.reply for answer in answers), self.steps, self._answered)
        self._log.acknowledge()
        if len({answer.reply.moved for answer in answers}) > 1 or recovered:  # the second time, nothing moves
            moves = [entry.pairs(self._num_slots)[1] for entry in entries if isinstance(entry, Move)]
            self._compare(np.unique(np.concatenate([NO_SLOTS, *moves])))
        return answers
