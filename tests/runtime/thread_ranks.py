"""Ranks that are threads of this process: they die and hang where a test says, in no time, and show what they keep."""

import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from scripted_nccl import Scripted

from tpverify.kv.replica import Replica
from tpverify.runtime.comm import SocketComm
from tpverify.runtime.messages import Frame
from tpverify.runtime.moves import Kept
from tpverify.runtime.rank import RankServer
from tpverify.runtime.ranks import RankGroup, RankLost

PLACES = {
    "entries": (Replica, "apply"),
    "gather": (SocketComm, "gather"),
    "relay": (SocketComm, "relay"),
    "meeting": (SocketComm, "connect"),
    "move": (Kept, "move"),
    "refill": (Kept, "refill"),
    "hashes": (Kept, "answer"),
    "nccl": (Scripted, "allgather"),
    "send": (Scripted, "send"),
    "recv": (Scripted, "recv"),
}


class Killed(BaseException):
    """The end of a rank: nothing that the rank does about exceptions stops it."""


class Process(threading.Thread):
    """One rank's, which meets the fates of its group."""

    def __init__(self, rank: int, group: "ThreadRanks") -> None:
        super().__init__(daemon=True)
        self.rank, self.group, self.fates = rank, group, group.fates
        self.server = RankServer(rank, group.place, group.nccl, 30.0)
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.outbox: queue.Queue[Any] = queue.Queue()
        self.ending, self.dead, self.hanging = threading.Event(), threading.Event(), False
        self.start()

    def run(self) -> None:
        try:
            while (message := self.inbox.get()) is not None:
                self.outbox.put(self.server.answer(message))
        except Killed:
            pass
        if self.server.comm is not None:
            self.server.comm.destroy()
        self.dead.set()

    def meet(self, place: str) -> None:
        if self.ending.is_set():
            raise Killed
        fate = self.fates.get((self.rank, place))
        if fate is None or self.group.started < fate[2]:
            return
        if fate[1]:
            fate[1] -= 1
            return
        del self.fates[self.rank, place]
        self.hanging = fate[0] == "hang"
        if self.hanging:
            self.ending.wait(30)
        raise Killed

    def die(self) -> None:
        """By itself, between two steps."""
        self.inbox.put(None)
        self.join(30)

    def end(self) -> None:
        self.ending.set()
        self.inbox.put(None)
        comm = self.server.comm
        for peer in list(getattr(comm, "_sockets", comm)._peers) if comm is not None else ():
            with suppress(OSError):  # closed meanwhile
                peer.shutdown(socket.SHUT_RDWR)  # wakes whoever reads it
        self.join(30)
        assert not self.is_alive()


class ThreadTransport:
    def __init__(self, processes: list[Any]) -> None:
        self.processes = processes

    def start(self, rank: int, actor: Process) -> Any:
        return actor.dead

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        self.processes[rank].inbox.put([memoryview(bytes(frame)) for frame in message])

    def receive(self, rank: int, timeout_s: float) -> list[memoryview] | None:
        try:
            return [memoryview(frame) for frame in self.processes[rank].outbox.get(timeout=max(timeout_s, 1e-4))]
        except queue.Empty:
            return None

    def close(self) -> None:
        pass


class ThreadRanks(RankGroup):
    """fates: {(rank, place): [fate, passes before it, processes started before it]}, each met once.

    place: "cpu", or "cpu:0" for ranks that take themselves for GPUs. nccl: whether they gather by what is put for it.
    """

    def __init__(self, size: int, deadline_s: float = 1.0, place: str = "cpu", nccl: bool = False) -> None:
        self.place, self.nccl = place, nccl
        self.size, self.deadline_s, self.device, self.device_reason = size, deadline_s, "cpu", None
        self._driver = os.getpid()
        self.closed, self.coordinator, self.collectives = False, None, {"backend": "sockets"}
        self.fates: dict[tuple[int, str], list[Any]] = {}
        self._actors, self._sentinels, self.pids = [None] * size, [None] * size, [0] * size
        self._owing, self.answers, self.started = set(), {}, 0
        self.transport = ThreadTransport(self._actors)
        self.start_anew(range(size))

    def _new_actor(self, rank: int) -> Process:  # type: ignore[override]
        self.started += 1
        return Process(rank, self)

    def _collect_pids(self, ranks: Sequence[int]) -> list[int]:
        return [1] * len(ranks)

    def _look_for_dead(self, number: int, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while True:
            for rank, process in enumerate(self._actors):
                if process.dead.is_set() and not process.ending.is_set():
                    raise RankLost(rank, number, "its process is gone")
            if time.monotonic() >= end:
                return
            time.sleep(0.005)

    def hung(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._actors[rank].hanging]

    def end(self, ranks: Sequence[int]) -> None:
        self._owing -= set(ranks)
        for rank in ranks:
            self._actors[rank].end()

    def close(self) -> None:
        self.closed = True
        self.end(range(self.size))

    def lose(self, rank: int, place: str, fate: str = "kill", after: int = 0, start: int = 0) -> None:
        """fate: "kill" or "hang", at one of PLACES."""
        self.fates[rank, place] = [fate, after, start]

    def kept(self, rank: int) -> Kept:
        return self._actors[rank].server.worker.kept

    def pool(self, rank: int) -> torch.Tensor:
        return self.kept(rank).pool


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet their fates at PLACES."""

    def watch(inner: Callable[..., Any], place: str) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*arguments: Any, **options: Any) -> Any:
            process = threading.current_thread()
            if isinstance(process, Process):
                process.meet(place)
            return inner(*arguments, **options)

        return call

    for place, (owner, name) in PLACES.items():
        monkeypatch.setattr(owner, name, watch(getattr(owner, name), place))
