"""A rank that died or hangs is replaced: a new process in its place gets tables and rows, and the step is done again.

Everything else stands still meanwhile, so there is nothing to lease and no position of the log to catch up with:
1. The lost process is ended. That closes its sockets, so that ranks which wait for it in a collective give up, and tell
   the others by closing theirs. Each answers that it was interrupted, with the entries of the step applied.
2. A new actor starts in the same bundle of the placement group.
3. All ranks meet anew (Join). The new one loads its weights and takes the tables of a snapshot at the log's end.
   Where CUDA graphs hold a communicator of NCCL's, each rank ends both, and builds all but its rows anew.
4. The lowest rank that was not lost sends all rows in use (Refill), some hundreds at a time.
5. Structural digests come with every answer; hashes of the rows sent are compared (RowHashes).
6. The step is sent again. Entries that are repeated are not applied twice, the work writes the same rows to the same
   slots, and draws belong to positions: the answer is the one that was lost.
A rank lost in 2 to 5 is ended too, and all begins again with those that are left.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tpverify.config import check_int
from tpverify.errors import RankFailure
from tpverify.kv import extents
from tpverify.kv.log import KvLog
from tpverify.kv.slots import NO_SLOTS, Slots
from tpverify.runtime.messages import Configure, Frame, Join, Refill, Reply, RowHashes, Step, Work
from tpverify.runtime.ranks import START_DEADLINE_S, Answer, RankGroup, RankLost, meeting

ROWS_AT_ONCE = 512  # of a refill: 36 MB with 61 layers of 1,152 bytes

logger = logging.getLogger(__name__)


@dataclass
class Recovered:
    """ranks: those replaced, and why each was. source: the rank whose `rows` they got. seconds: detect (from the step's
    start; a hang shows at the deadline), end (of the lost, and of what the others were at), start (a process that
    answers), join (meet, load weights), refill, check, rerun."""

    step: int
    ranks: dict[int, str]
    source: int
    rows: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        lost = ", ".join(f"rank {rank}: {cause.rstrip('.')}" for rank, cause in sorted(self.ranks.items()))
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        return f"replaced at step {self.step} in {sum(self.seconds.values()):.1f} s ({lost}); {parts}; {self._rows()}"

    def _rows(self) -> str:
        return f"{self.rows} rows from rank {self.source}"


def checked_restarts(max_restarts: object) -> int:
    """Raises ArgumentError."""
    return check_int("max_restarts", max_restarts, 0, 2**31 - 1)


def require_tables(replies: Iterable[tuple[int, Reply]], number: int, digest: str) -> None:
    """Raise RankFailure for a rank whose tables, after step `number`, are not those of this digest."""
    for rank, reply in replies:
        if reply.digest != digest:
            cause = f"its tables diverged: digest {reply.digest}, the coordinator's is {digest}"
            raise RankFailure(rank, number, cause)


class Recovery:
    """Sends the steps of one coordinator, and replaces ranks that are lost on the way: at most max_restarts of them.

    configure: what ranks 0..tp-1 were built with. log: the one that they follow.
    """

    def __init__(self, group: RankGroup, configure: Configure, log: KvLog, max_restarts: int) -> None:
        self._group, self._configure, self._log, self._left = group, configure, log, max_restarts
        self._ranks = range(configure.tp)
        self.done: list[Recovered] = []

    def step(
        self, step: Step, frames: Sequence[Frame], own: Sequence[Sequence[Frame]] | None, deadline_s: float | None
    ) -> tuple[list[Answer], Recovered | None]:
        """As RankGroup.attempt on all ranks, and what was lost meanwhile. Raises RankFailure, after which the group is
        of no further use, for whatever is not mended by a new process, and for a loss when no rank is left to take the
        rows from, or no restart."""
        recovered = None
        while True:
            start = time.perf_counter()
            try:
                answers = self._group.attempt(step, frames, own, self._ranks, deadline_s)
            except RankLost as lost:
                if self._left == 0:
                    raise
                recovered = self._replace(lost, step, time.perf_counter() - start)
                continue
            if recovered is not None:
                recovered.seconds["rerun"] = time.perf_counter() - start
                self.done.append(recovered)
                logger.warning("%s", recovered)
            return answers, recovered

    def _replace(self, failure: RankLost, step: Step, detect: float) -> Recovered:
        lost = {failure.rank: failure.cause}
        found = Recovered(step.number, lost, -1, 0, {"detect": detect})
        clock = Clock(found.seconds)
        while True:
            self._end(lost, step.number)
            clock.lap("end")
            whole = [rank for rank in self._ranks if rank not in lost]
            if not whole:
                raise RankFailure(failure.rank, step.number, f"{failure.cause}; no rank is left to take its rows from")
            if self._left < len(lost):
                raise RankFailure(failure.rank, step.number, f"{failure.cause}; no restart is left")
            self._left -= len(lost)
            found.source, targets = whole[0], [rank for rank in self._ranks if rank in lost]
            try:
                self._group.start_anew(sorted(lost))
                clock.lap("start")
                self._join(step)
                clock.lap("join")
                slots = self._log.held() if targets else NO_SLOTS  # ranks beyond tp have no rows
                self._refill(step, slots, found.source, targets)
                clock.lap("refill")
                self._check(step, slots, found.source, targets)
                clock.lap("check")
                found.rows = slots.size
                return found
            except RankLost as again:
                lost[again.rank] = again.cause

    def _end(self, lost: dict[int, str], number: int) -> None:
        """End the lost ranks' processes, and those of ranks that are still silent then."""
        waiting = True
        while waiting:
            self._group.end(sorted(lost))
            try:
                late = self._group.drain(number, self._group.deadline_s)
            except RankLost as again:
                lost[again.rank] = again.cause
                continue
            if waiting := bool(late):
                silent = self._group.hung(late) or late  # the others may wait for one that hangs
                lost |= dict.fromkeys(silent, "no answer after the loss of another rank")
        replies = [(rank, reply) for rank, (reply, _) in self._group.answers.items() if rank not in lost]
        for rank, reply in replies:
            if reply.error is not None and not reply.interrupted:
                raise RankFailure(rank, number, reply.error)
        require_tables(replies, number, self._log.digest())

    def _join(self, step: Step) -> None:
        with meeting() as rendezvous:
            now = {"rendezvous": rendezvous, "generation": self._group.generation}
            configure = msgspec.structs.replace(self._configure, **now)
            self._ask(step, Join(configure, self._log.snapshot()), START_DEADLINE_S)

    def _refill(self, step: Step, slots: Slots, source: int, targets: list[int]) -> None:
        for first in range(0, slots.size, ROWS_AT_ONCE):
            self._ask(step, Refill(extents.pack(slots[first : first + ROWS_AT_ONCE]), source, targets))

    def _check(self, step: Step, slots: Slots, source: int, targets: list[int]) -> None:
        """Whether the rows came over as they are: work that was interrupted may have left others different."""
        for first in range(0, slots.size, ROWS_AT_ONCE):
            part = slots[first : first + ROWS_AT_ONCE]
            answers = self._ask(step, RowHashes(extents.pack(part)))
            right = np.frombuffer(answers[source].result(), "<u8")
            for target in targets:
                wrong = np.flatnonzero(np.frombuffer(answers[target].result(), "<u8") != right)
                if wrong.size:
                    cause = f"what it got from rank {source} differs: the row in slot {part[wrong[0]]}"
                    raise RankFailure(target, step.number, cause)

    def _ask(self, step: Step, work: Work, deadline_s: float | None = None) -> list[Answer]:
        """Of all ranks, none of which changes its tables."""
        after = step.log_first + len(step.entries)
        answers = self._group.attempt(Step(step.number, after, [], work), (), None, self._ranks, deadline_s)
        require_tables(enumerate(answer.reply for answer in answers), step.number, self._log.digest())
        return answers


class Clock:
    """Adds up what passes between laps, by name."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now
