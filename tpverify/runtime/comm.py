"""Collectives between the ranks of one group: by sockets between CPUs, by NCCL between GPUs."""

import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tpverify.runtime.frames import frame_of

RETRY_S = 0.02  # between attempts to reach a rank 0 that does not listen yet
LOOK_S = 0.25  # how often rank 0, waiting for the others, looks whether they are still expected
UNIQUE_ID_BYTES = 128  # NCCL's
PEER_LEFT = "a peer has closed its connection"
HELLO = struct.Struct("<I")  # a rank's number, the first thing it sends


class Comm(Protocol):
    """Ranks 0..size-1 that call the same collectives in the same order, with shapes and dtypes that fit."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """On rank 0 every rank's x, all of one shape, in rank order; None elsewhere."""

    def relay(self, x: Tensor, source: int, targets: Sequence[int]) -> None:
        """x of rank `source` into x of the targets, of its shape and dtype; all of them contiguous. Others do nothing.
        Rank 0 is the source or a target: it has the connections."""

    def connect(self, rendezvous: str) -> None:
        """Meet the other ranks anew, some of which are new: see SocketComm."""

    def wait(self, stream: Any = None) -> None:
        """Return when this rank has done all that it was asked for. Until then a GPU's work is only enqueued, on the
        current stream or another."""

    def destroy(self) -> None:
        """Close the connections. The communicator cannot be used afterwards."""


class SocketComm:
    """A star of Unix sockets around rank 0.

    With more ranks than cores every hop is a context switch, and a communication thread a rank makes two of it. Eight
    ranks on two cores, 4 KB each: all-gather by gloo's ring 15 ms, by gloo sends arranged as a star 1.3 ms, by this
    star 0.3 ms; in a decode step, where ranks come late, 10 ms against 1. Raises OSError (ConnectionError,
    TimeoutError) when a peer is gone or timeout_s is over.
    """

    def __init__(self, rendezvous: str, rank: int, size: int, timeout_s: float) -> None:
        """Meets the peers, see `connect`."""
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._peers: list[socket.socket] = []  # of rank 0: ranks 1..size-1; of the others: rank 0
        self.connect(rendezvous)

    def connect(self, rendezvous: str) -> None:
        """Connect all ranks, again if some of them are new.

        rendezvous: path of a socket that rank 0 makes, in a directory that nobody else can enter. Whoever made the
        directory removes it to call the meeting off: ConnectionAbortedError. When all have come, rank 0 does.
        """
        self.destroy()
        try:
            if self.rank == 0:
                self._peers = _accept(rendezvous, self.size, self._timeout_s)
            else:
                self._peers = [_connect(rendezvous, self._timeout_s)]
                self._peers[0].sendall(HELLO.pack(self.rank))
        except BaseException:
            self.destroy()
            raise

    def gather(self, x: Tensor) -> list[Tensor] | None:
        if self.rank != 0:
            self._peers[0].sendall(frame_of(x))
            return None
        parts = [x, *(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in self._peers)]
        for peer, part in zip(self._peers, parts[1:], strict=True):
            _receive(peer, frame_of(part))
        return parts

    def allgather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Every rank's x [rows[rank], ...], one after another: [sum(rows), ...]."""
        out = x.new_empty(sum(rows), *x.shape[1:])
        self.prepare_allgather(x.contiguous(), rows, out)()
        return out

    def prepare_allgather(self, x: Tensor, rows: Sequence[int], out: Tensor) -> Callable[[], None]:
        """allgather of what is in x, contiguous, whenever the result is called; into `out`, contiguous."""
        assert len(rows) == self.size and x.shape[0] == rows[self.rank] and x.is_contiguous() and out.is_contiguous()
        own, frame = frame_of(x), frame_of(out)
        first, *others = _split(frame, rows)

        def at_first() -> None:
            first[:] = own
            for peer, part in zip(self._peers, others, strict=True):
                _receive(peer, part)
            for peer in self._peers:
                peer.sendall(frame)

        def at_others() -> None:
            if own:  # rank 0 waits for nothing else, and may be through, and gone, before a rank without rows
                self._peers[0].sendall(own)
            _receive(self._peers[0], frame)

        return at_first if self.rank == 0 else at_others

    def alltoall(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Of every rank's x [sum(rows), ...] this rank's rows, side by side: [rows[rank], size, ...]."""
        out = x.new_empty(rows[self.rank], self.size, *x.shape[1:])
        self.prepare_alltoall(x.contiguous(), rows, out)()
        return out

    def prepare_alltoall(self, x: Tensor, rows: Sequence[int], out: Tensor) -> Callable[[], None]:
        """alltoall of what is in x, as prepare_allgather."""
        assert len(rows) == self.size and x.shape[0] == sum(rows) and x.is_contiguous() and out.is_contiguous()
        own, frame = frame_of(x), frame_of(out)
        if self.rank != 0:

            def at_others() -> None:
                self._peers[0].sendall(own)
                _receive(self._peers[0], frame)

            return at_others
        parts, by_row = x.new_empty(self.size, *x.shape), x.new_empty(x.shape[0], self.size, *x.shape[1:])
        first, *others = _split(frame_of(parts), [1] * self.size)
        kept, *answers = _split(frame_of(by_row), rows)

        def at_first() -> None:
            first[:] = own
            for peer, part in zip(self._peers, others, strict=True):
                _receive(peer, part)
            by_row.copy_(parts.transpose(0, 1))
            for peer, part in zip(self._peers, answers, strict=True):
                if part:
                    peer.sendall(part)
            frame[:] = kept

        return at_first

    def relay(self, x: Tensor, source: int, targets: Sequence[int]) -> None:
        assert 0 in (source, *targets)
        if self.rank == source != 0:
            self._peers[0].sendall(frame_of(x))
        elif self.rank == 0:
            if source != 0:
                _receive(self._peers[source - 1], frame_of(x))
            for target in targets:
                if target != 0:
                    self._peers[target - 1].sendall(frame_of(x))
        elif self.rank in targets:
            _receive(self._peers[0], frame_of(x))

    def look(self) -> None:
        """Raise ConnectionError if a peer that this rank is connected with has closed the connection. At once."""
        for peer in self._peers:
            poll = select.poll()
            poll.register(peer, select.POLLIN)
            if poll.poll(0) and not peer.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError(PEER_LEFT)

    def wait(self, stream: Any = None) -> None:
        pass

    def destroy(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers = []


class GpuComm:
    """Ranks with a GPU each, by NCCL; or ranks that share GPUs, which NCCL refuses, by their sockets. Tensors on GPUs.

    nccl: a pynccl.NcclCommunicator, which stays when this is destroyed; None for a rank alone, or one that shares a
    GPU. NCCL does not notice that a peer is gone. Its connection's end tells, and so on from rank to rank.
    """

    def __init__(self, sockets: SocketComm, nccl: Any) -> None:
        self.rank, self.size = sockets.rank, sockets.size
        self._sockets, self._nccl = sockets, nccl
        if nccl is not None:
            nccl.watch = sockets.look

    def gather(self, x: Tensor) -> list[Tensor] | None:
        if self.size == 1:
            return [x]
        if self._nccl is None:
            return self._sockets.gather(x.cpu())
        out = x.new_empty(self.size, *x.shape)
        self._nccl.allgather(x, out)
        return list(out) if self.rank == 0 else None

    def connect(self, rendezvous: str) -> None:
        assert self._nccl is None, "a communicator of NCCL's is made once, and so are the graphs that hold it"
        self._sockets.connect(rendezvous)

    @property
    def capturable(self) -> bool:
        """Whether gathers are only enqueued, so that a CUDA graph can have them."""
        return self.size == 1 or self._nccl is not None

    def allgather_into(self, x: Tensor, out: Tensor) -> None:
        """Every rank's x into out [size, *x.shape]. By NCCL it is enqueued, and may be captured in a CUDA graph."""
        if self._nccl is None:
            out.copy_(self._sockets.allgather(x.cpu()[None], [1] * self.size))
        else:
            self._nccl.allgather(x, out)

    def relay(self, x: Tensor, source: int, targets: Sequence[int]) -> None:
        """By NCCL it is enqueued."""
        if self._nccl is None:
            host = x.cpu()
            self._sockets.relay(host, source, targets)
            x.copy_(host)
        elif self.rank == source:
            for target in targets:
                self._nccl.send(x, target)
        elif self.rank in targets:
            self._nccl.recv(x, source)

    def wait(self, stream: Any = None, meanwhile: Callable[[float], None] | None = None) -> None:
        if self._nccl is not None:
            self._nccl.wait(stream, meanwhile)
            return
        stream, start = stream or torch.cuda.current_stream(), time.monotonic()
        while meanwhile is not None and not stream.query():
            meanwhile(time.monotonic() - start)
        stream.synchronize()

    def destroy(self) -> None:
        self._sockets.destroy()


def join_nccl(sockets: SocketComm, device: str, deadline_s: float) -> Any:
    """A pynccl.Communicator of the ranks that these sockets connect, which carry its name. Raises as pynccl.init."""
    from tpverify import pynccl

    name = torch.empty(0, dtype=torch.uint8)
    if sockets.rank == 0:
        name = torch.frombuffer(bytearray(pynccl.unique_id()), dtype=torch.uint8)
    name = sockets.allgather(name, [UNIQUE_ID_BYTES] + [0] * (sockets.size - 1))
    named = name.numpy().tobytes(), sockets.rank, sockets.size
    return pynccl.init(*named, device=device, deadline_s=deadline_s, watch=sockets.look)


def _accept(path: str, size: int, timeout_s: float) -> list[socket.socket]:
    """The peers' sockets in rank order."""
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(size)
        while len(peers) < size - 1:
            listener.settimeout(min(max(end - time.monotonic(), 1e-3), LOOK_S))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > end:
                    raise
                if not os.path.exists(path):
                    raise ConnectionAbortedError("the meeting of the ranks was called off") from None
                continue
            peer.settimeout(timeout_s)
            hello = bytearray(HELLO.size)
            _receive(peer, memoryview(hello))
            peers[HELLO.unpack(hello)[0]] = peer
    with suppress(OSError):  # somebody else's files in it
        os.unlink(path)
        os.rmdir(os.path.dirname(path))  # a driver that is killed from now on leaves nothing
    return [peers[rank] for rank in range(1, size)]


def _connect(path: str, timeout_s: float) -> socket.socket:
    end = time.monotonic() + timeout_s
    while True:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(timeout_s)
        try:
            peer.connect(path)
            return peer
        except (FileNotFoundError, ConnectionRefusedError):
            peer.close()
            if not os.path.isdir(os.path.dirname(path)):
                raise ConnectionAbortedError("the meeting of the ranks was called off") from None
            if time.monotonic() > end:
                raise TimeoutError(f"rank 0 did not come to {path} within {timeout_s:g} s") from None
            time.sleep(RETRY_S)


def _split(frame: memoryview, rows: Sequence[int]) -> list[memoryview]:
    """The frame of sum(rows) rows, cut into parts of rows[0], rows[1], ... rows."""
    each = len(frame) // max(sum(rows), 1)
    ends = list(itertools.accumulate(rows))
    return [frame[each * (end - count) : each * end] for count, end in zip(rows, ends, strict=True)]


def _receive(peer: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer."""
    while len(buffer):
        count = peer.recv_into(buffer)
        if count == 0:
            raise ConnectionResetError(PEER_LEFT)
        buffer = buffer[count:]
