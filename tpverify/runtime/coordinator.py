"""The one writer of the log: numbers the steps, sends the pending entries along, compares the digests."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from tpverify.config import check_int, check_type
from tpverify.errors import ClusterError
from tpverify.kv.log import KvLog
from tpverify.runtime.messages import Configure, Frame, Ping, Step, Work
from tpverify.runtime.ranks import RENDEZVOUS, START_DEADLINE_S, Answer, RankGroup


class Coordinator:
    """Drives ranks 0..tp-1 of a group through `log`, a KvLog whose changes ride on the next step.

    kind, options: the workers that the ranks build, see rank.WORKERS. Building a coordinator resets those ranks, and
    ends an earlier one on the same group. One thread at a time.
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
    ) -> None:
        check_type("group", group, RankGroup, "a RankGroup or None")
        self.group = group
        self.tp = group.size if tp is None else check_int("tp", tp, 1, group.size)
        self._log = KvLog(num_slots, max_sequences)
        self.steps = 0
        self._answered = ""
        group.coordinator = self
        with tempfile.TemporaryDirectory(prefix="tpverify-") as directory:
            configure = Configure(self.tp, num_slots, kind, options, os.path.join(directory, RENDEZVOUS))
            self._step(configure, (), None, START_DEADLINE_S)

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

    def stats(self) -> dict[str, int]:
        """The log's counts, and `steps` sent; after the end too."""
        return self._log.stats() | {"steps": self.steps}

    def close(self) -> None:
        """End this coordinator; the group stays as it is."""
        if self.group.coordinator is self:
            self.group.coordinator = None

    def step(
        self, work: Work, frames: Sequence[Frame] = (), own: Sequence[Sequence[Frame]] | None = None
    ) -> list[Answer]:
        """Apply the pending log entries on every rank, then do `work` there. Returns the answers in rank order.

        frames go to every rank, then own[rank] to that rank alone. Raises RankFailure if a rank fails, dies or is late,
        or if its tables differ from the log's; the group is closed then.
        """
        return self._step(work, frames, own, None)

    def digests(self) -> dict[str | int, str]:
        """Structural digests: of the log as "driver", and of every rank by number."""
        answers = self.step(Ping())
        return {"driver": self._answered} | {answer.reply.rank: answer.reply.digest for answer in answers}

    def _step(
        self, work: Work, frames: Sequence[Frame], own: Sequence[Sequence[Frame]] | None, deadline_s: float | None
    ) -> list[Answer]:
        first, entries = self.log.pending()
        self.steps += 1
        answers = self.group.call(Step(self.steps, first, entries, work), frames, own, self.tp, deadline_s)
        self._answered = expected = self._log.digest()  # before the acknowledgement, which may add an entry
        for rank, (reply, _) in enumerate(answers):
            if reply.digest != expected:
                cause = f"its tables diverged: digest {reply.digest}, the coordinator's is {expected}"
                raise self.group.fail(rank, self.steps, cause)
        self._log.acknowledge()
        return answers
