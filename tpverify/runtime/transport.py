"""Two ways to carry a message to a rank and its answer back: sockets for serving, Ray calls as their oracle."""

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray

from tpverify.runtime.connection import Connection, Link
from tpverify.runtime.messages import Frame

CALLS = "calls"  # the actor's concurrency group for RayTransport
RANK_SPIN_S = 5e-3  # how long a rank that spins looks for the next step: the driver's work between two is over by then


class Transport(Protocol):
    """One message in flight a rank. A rank that is gone never answers: whoever waits looks after the ranks too.

    Built with the number of ranks, and spin_s: how long after a send `receive` looks for the answer without sleeping;
    0 where ranks share cores. meanwhile: called between looks with the seconds since the send.
    """

    meanwhile: Callable[[float], None] | None

    def start(self, rank: int, actor: Any) -> Any:
        """Make the actor serve as this rank, in the place of an earlier one if there was. Returns a Ray reference that
        is ready only when the actor has ended."""

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Never waits: `receive`, of any rank, sends the rest. Buffers must stay as they are until the answer."""

    def receive(self, rank: int, timeout_s: float) -> list[memoryview] | None:
        """The rank's answer, or None if there is none within timeout_s. ValueError if what came is no message."""

    def close(self) -> None: ...


class SocketTransport:
    """A Unix socket a rank. No call waits but `receive`, and that for all ranks at once."""

    def __init__(self, size: int, spin_s: float = 0.0) -> None:
        self._links: list[Link | None] = [None] * size
        self._spin_s, self._sent_at = spin_s, 0.0
        self.meanwhile: Callable[[float], None] | None = None

    def start(self, rank: int, actor: Any) -> Any:
        self._close(rank)
        link = self._links[rank] = Link(f"rank {rank}")
        return actor.run.remote(link.endpoint, RANK_SPIN_S if self._spin_s else 0.0)

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        self._link(rank).send(message)
        self._sent_at = time.monotonic()

    def receive(self, rank: int, timeout_s: float) -> list[memoryview] | None:
        awaited, end = self._link(rank), time.monotonic() + timeout_s
        while True:
            for link in self._unsent():
                link.flush()
            message, now = awaited.look(), time.monotonic()
            if message is not None or now >= end:
                return message
            if now - self._sent_at >= self._spin_s:
                self._wait(awaited, end - now)
            elif self.meanwhile is not None:
                self.meanwhile(now - self._sent_at)

    def close(self) -> None:
        for rank in range(len(self._links)):
            self._close(rank)

    def _link(self, rank: int) -> Link:
        link = self._links[rank]
        assert link is not None, "start comes first"
        return link

    def _close(self, rank: int) -> None:
        if (link := self._links[rank]) is not None:
            link.close()

    def _unsent(self) -> list[Link]:
        return [link for link in self._links if link is not None and link.unsent]

    def _wait(self, awaited: Link, timeout_s: float) -> None:
        """Until something comes from the awaited rank, or any rank takes more of its message: ranks wait for each
        other, so one that is late must not keep the others from theirs."""
        poll = select.poll()
        for link in {awaited, *self._unsent()}:
            if not link.gone:
                incoming = select.POLLIN if link is awaited or link.listening else 0
                poll.register(link.socket, incoming | (select.POLLOUT if link.unsent else 0))
        poll.poll(timeout_s * 1000)


class RayTransport:
    """Ray actor calls. Several times slower a step than sockets, and nothing of ours in between, nor in its waits."""

    meanwhile: Callable[[float], None] | None = None

    def __init__(self, size: int, spin_s: float = 0.0) -> None:
        self._actors: list[Any] = [None] * size
        self._answers: list[Any] = [None] * size

    def start(self, rank: int, actor: Any) -> Any:
        self._actors[rank] = actor
        return actor.idle.remote()

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        call = self._actors[rank].answer.options(concurrency_group=CALLS)
        self._answers[rank] = call.remote([bytes(frame) for frame in message])

    def receive(self, rank: int, timeout_s: float) -> list[memoryview] | None:
        if not ray.wait([self._answers[rank]], timeout=timeout_s)[0]:
            return None
        try:
            return [memoryview(frame) for frame in ray.get(self._answers[rank])]
        except ray.exceptions.RayError:  # the rank is gone: its reference from `start` tells why
            return None

    def close(self) -> None:
        self._actors = []


def serve(endpoint: str, spin_s: float, answer: Callable[[list[memoryview]], list[Frame]]) -> None:
    """The rank's side of SocketTransport: answer messages until the driver is gone, which is a ConnectionError.

    spin_s: how long it looks for the next one without sleeping.
    """
    with socket.socket(socket.AF_UNIX) as stream:
        try:
            stream.connect(endpoint)
        except OSError as failure:
            raise ConnectionError(f"no driver listens at {endpoint}: {failure}") from failure
        driver = Connection("the driver", stream)
        while True:
            driver.send(answer(_next(driver, spin_s)))


def _next(driver: Connection, spin_s: float) -> list[memoryview]:
    end = time.monotonic() + spin_s
    while time.monotonic() < end:
        try:
            return driver.receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
    return driver.receive()
