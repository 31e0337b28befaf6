"""NCCL for ranks that are threads: it waits for peers for ever, like the real one, and an abort ends only when no
captured graph holds the communicator any longer."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 10.0
ABORT_S = 2.0


class Scripted:
    """A pynccl.NcclCommunicator among threads, which meet by the name that they were given."""

    everything: "list[Scripted]" = []
    _boards: dict[bytes, dict[Any, Tensor]] = {}

    def __init__(self, name: bytes, rank: int, size: int, watch: Callable[[], None]) -> None:
        self.rank, self.size, self.watch, self.failure = rank, size, watch, None
        self.graphs: weakref.WeakSet[Captured] = weakref.WeakSet()
        self.destroyed = False
        self._board = self._boards.setdefault(name, {})
        self._calls = {(a, b): itertools.count() for a in range(size) for b in range(-1, size)}
        self.everything.append(self)
        self.allgather(torch.zeros(1), torch.zeros(size))  # everyone has to come

    def _until(self, there: Callable[[], bool]) -> None:
        """An error shows in what has come through, too."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.failure is not None:
                    raise ConnectionError(f"this communicator has ended: {self.failure}")
                if there():
                    return
                self.watch()
                assert time.monotonic() < end, "nobody told this rank that a peer is lost"
            except OSError:
                self.abort()
                raise
            time.sleep(1e-4)

    def allgather(self, x: Tensor, out: Tensor) -> None:
        call = next(self._calls[self.rank, -1])
        self._board["gather", self.rank, call] = x.clone()
        keys = [("gather", rank, call) for rank in range(self.size)]
        self._until(lambda: all(key in self._board for key in keys))
        out.view(-1).copy_(torch.cat([self._board[key].view(-1) for key in keys]))

    def send(self, x: Tensor, peer: int) -> None:
        self._board["send", self.rank, peer, next(self._calls[self.rank, peer])] = x.clone()

    def recv(self, out: Tensor, peer: int) -> None:
        key = "send", peer, self.rank, next(self._calls[peer, self.rank])
        self._until(lambda: key in self._board)
        out.copy_(self._board[key])

    def wait(self, stream: object = None, meanwhile: object = None) -> None:
        self._until(lambda: True)

    def abort(self) -> None:
        self.failure = self.failure or "aborted"

    def destroy(self) -> None:
        assert self.failure is not None, "no peer is asked whether it destroys its own"
        end = time.monotonic() + ABORT_S
        while len(self.graphs):
            if time.monotonic() > end:
                raise RuntimeError("a graph holds this communicator")
            time.sleep(0.01)
        self.destroyed = True


class Captured:
    """A graph that holds the communicator whose collectives are in it."""

    def __init__(self, comm: Scripted, run: Callable[[], None]) -> None:
        self.comm, self.run = comm, run
        comm.graphs.add(self)

    def replay(self) -> None:
        assert self.comm.failure is None, "a graph of a communicator that has ended"
        try:
            self.run()
        finally:
            for cell in self.run.__closure__ or ():  # a real one runs no Python, and remembers none of its errors
                if isinstance(cell.cell_contents, list):
                    cell.cell_contents.clear()


class Recorder:
    """In place of graphs.Recorder."""

    def __init__(self, wait: Any) -> None:
        self._comm = wait.__self__._nccl

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return run if self._comm is None else Captured(self._comm, run).replay


_names = itertools.count()
_lock = threading.Lock()


def unique_id() -> bytes:
    with _lock:
        return next(_names).to_bytes(128, "little")


def init(name: bytes, rank: int, size: int, *, device: str, deadline_s: float, watch: Callable[[], None]) -> Scripted:
    return Scripted(name, rank, size, watch)
