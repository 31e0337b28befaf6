"""Two ways to carry a message to a rank and its answer back: sockets for serving, Ray calls as their oracle."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
import zmq

from tpverify.runtime.messages import Frame

CALLS = "calls"  # the actor's concurrency group for RayTransport


class Transport(Protocol):
    """One message in flight a rank. A rank that is gone never answers: whoever waits looks after the ranks too."""

    def start(self, rank: int, actor: Any) -> Any:
        """Make the actor serve as this rank, in the place of an earlier one if there was. Returns a Ray reference that
        is ready only when the actor has ended."""

    def settled(self) -> None:
        """Called when all that were started have answered for the first time."""

    def send(self, rank: int, message: Sequence[Frame]) -> None: ...

    def receive(self, rank: int, timeout_s: float) -> list[memoryview] | None:
        """The rank's answer, or None if there is none within timeout_s."""

    def close(self) -> None: ...


class ZmqTransport:
    """A PAIR socket a rank over ipc://, bound by the rank in a private directory that lives only until all have met."""

    def __init__(self, size: int) -> None:
        self._directory: str | None = None
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[Any] = [None] * size
        self._timeouts_ms = [-1] * size  # of receiving, as the sockets have them

    def _connect(self, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(zmq.PAIR)
        socket.linger = 0
        socket.reconnect_ivl = 10  # ms; until the rank has bound it
        socket.connect(endpoint)
        return socket

    def start(self, rank: int, actor: Any) -> Any:
        if self._directory is None:
            self._directory = tempfile.mkdtemp(prefix="tpverify-")  # mode 0700
        if self._sockets[rank] is not None:
            self._sockets[rank].close(linger=0)
        endpoint = "ipc://" + os.path.join(self._directory, str(rank))
        self._sockets[rank], self._timeouts_ms[rank] = self._connect(endpoint), -1
        return actor.run.remote(endpoint)

    def settled(self) -> None:
        if self._directory is not None:  # connections stay; a killed driver leaves nothing behind
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        _send(self._sockets[rank], message)

    def receive(self, rank: int, timeout_s: float) -> list[memoryview] | None:
        socket, timeout_ms = self._sockets[rank], round(timeout_s * 1000)
        if timeout_ms != self._timeouts_ms[rank]:  # rarely: a poll before each receipt costs more than the receipt
            socket.rcvtimeo = self._timeouts_ms[rank] = timeout_ms
        try:
            return _receive(socket)
        except zmq.Again:
            return None

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.settled()


class RayTransport:
    """Ray actor calls. Several times slower a step than sockets, and nothing of ours in between."""

    def __init__(self, size: int) -> None:
        self._actors: list[Any] = [None] * size
        self._answers: list[Any] = [None] * size

    def start(self, rank: int, actor: Any) -> Any:
        self._actors[rank] = actor
        return actor.idle.remote()

    def settled(self) -> None:
        pass

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


def serve(endpoint: str, answer: Callable[[list[memoryview]], list[Frame]]) -> None:
    """The rank's side of ZmqTransport: answer messages for ever."""
    with zmq.Context(io_threads=1) as context, context.socket(zmq.PAIR) as socket:
        socket.bind(endpoint)
        while True:
            _send(socket, answer(_receive(socket)))


def _send(socket: zmq.Socket, message: Sequence[Frame]) -> None:
    """Most messages are one small frame, which takes a third of the code that several take. On cores that ranks share
    that counts: whatever is run has left the caches since the step before."""
    if len(message) == 1:
        socket.send(message[0])
    else:
        socket.send_multipart(message, copy=False)


def _receive(socket: zmq.Socket) -> list[memoryview]:
    first = socket.recv(copy=False)
    others = socket.recv_multipart(copy=False) if first.more else ()
    return [first.buffer, *(frame.buffer for frame in others)]
