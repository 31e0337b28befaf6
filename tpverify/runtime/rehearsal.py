"""Host code that stays warm while a GPU works.

A step of 20 ms leaves the host's code out of its caches, and what takes 30 us in a loop then takes 200 (plan 0004). So
whoever waits for the GPU, or for a rank that does, runs a step of tables of its own now and then: the same functions
from the driver's draft to the rank's answer and back, on other data.
"""

import socket
import weakref

import numpy as np

from tpverify.kv.log import KvLog
from tpverify.runtime import messages
from tpverify.runtime.connection import Connection
from tpverify.runtime.messages import Configure, Ping, Step
from tpverify.runtime.rank import TABLES, RankServer

SHORT_S = 4e-3  # waits in which code stays warm enough: twice as slow after 2 ms, three times after 5, eight after 20
BEFORE_S = 1e-3  # the end of a wait as long as the last one: late enough to stay warm, and over before it is needed
NODES, MOST = 32, 1024  # of a tree; positions of a sequence before another takes its place


class Rehearsal:
    """Call it with the seconds that a wait has lasted, as often as the wait looks. Once in each it rehearses, shortly
    before the end if it lasts as long as the one before."""

    def __init__(self) -> None:
        ends = socket.socketpair()
        for end in ends:
            weakref.finalize(self, end.close)
        self._driver, self._rank = (Connection("itself", end) for end in ends)
        self._log, self._server = KvLog(MOST + 4 * NODES, 1), RankServer(0, "cpu", False, 1.0)
        self._seq, self._number = self._log.open(), 0
        self._waited = self._last = 0.0
        self._step(Configure(1, MOST + 4 * NODES, TABLES, {}, ""))

    def __call__(self, waited_s: float) -> None:
        if waited_s < self._waited:  # a new wait has begun
            self._last, self._waited = self._waited, 0.0
        if self._waited < max(SHORT_S, self._last - BEFORE_S) <= waited_s:
            self.rehearse()
        self._waited = waited_s

    def rehearse(self) -> None:
        """A step of a drafted tree, of which three nodes are committed."""
        if self._log.length(self._seq) > MOST - 3:
            self._log.close(self._seq)
            self._seq = self._log.open()
        self._log.draft(self._seq, NODES)
        self._step(Ping())
        self._log.commit(self._seq, np.arange(3))

    def _step(self, work: Configure | Ping) -> None:
        first, entries = self._log.pending()
        self._number += 1
        self._driver.send([messages.encode(Step(self._number, first, entries, work))])
        self._rank.send(self._server.answer(self._rank.receive()))
        reply = messages.decode_reply(self._driver.receive()[0])
        assert reply.error is None and reply.digest == self._log.digest(), "tables of its own, and nobody else's"
        self._log.acknowledge()
