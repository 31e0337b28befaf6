"""Collectives between one process a GPU, over NCCL, and the same interface over gloo for processes without one.

One process calls unique_id and hands the bytes to all; then everyone calls init with them. Nothing waits longer than
the deadline that init was given, and a wait that ends without its peers is an OSError: TimeoutError for a deadline,
ConnectionError for anything else. After an error the communicator is aborted, and all that is left is destroy.
A peer that is gone does not show in NCCL by itself: `watch`, called while something is waited for, may know better.
NCCL comes through NVIDIA's nccl4py, an optional dependency.
"""

import functools
import importlib
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.communicator import DTYPES, Checks, Communicator, Meanwhile
from tpverify.config import check_choice, check_deadline, check_int, check_type
from tpverify.errors import ArgumentError

__all__ = ["DTYPES", "Communicator", "init", "preflight", "unique_id", "versions", "why_not"]

BACKENDS = ("nccl", "gloo")
SPIN_S = 5e-2  # how long to look without a pause: a step is over by then
PAUSE_S = 1e-4
ABORT_S = 30.0  # for NCCL to end its threads and free its memory, once nothing holds them
PREFLIGHT_BYTES = (1 << 16, 1 << 20)  # a rank's share in the check
PREFLIGHT_ROUNDS = 20
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}


def unique_id(backend: str = "nccl") -> bytes:
    """A name under which ranks find each other. The process that made it must live until all have come."""
    if check_choice("backend", backend, BACKENDS) == "nccl":
        nccl = _nccl()
        _keep_log()
        return bytes(nccl.get_unique_id())
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    name = str(server.port).encode()
    _servers[name] = server
    return name


def init(
    unique_id: bytes,
    rank: int,
    size: int,
    *,
    backend: str = "nccl",
    device: Any = None,
    deadline_s: float = 30.0,
    watch: Callable[[], None] = lambda: None,
) -> Communicator:
    """Join the others. Every rank calls it, each from its own process.

    device: the rank's GPU, by default the current one. watch: of the communicator, from now on; gloo, which notices by
    itself, does not call it. Raises ArgumentError; ImportError without nccl4py; OSError, with everything freed, if the
    others do not come within deadline_s.
    """
    check_type("unique_id", unique_id, bytes, "the bytes that unique_id returned")
    check_int("size", size, 1, 1 << 16)
    check_int("rank", rank, 0, size - 1)
    check_deadline(deadline_s)
    if check_choice("backend", backend, BACKENDS) == "nccl":
        return NcclCommunicator(unique_id, rank, size, _gpu(device), deadline_s, watch)
    if not unique_id.isdigit():
        raise ArgumentError("unique_id", "the bytes that unique_id('gloo') returned", repr(unique_id))
    return GlooCommunicator(unique_id, rank, size, deadline_s)


def _gpu(device: Any) -> torch.device:
    name = "cuda" if device is None else f"cuda:{device}" if type(device) is int else device
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type != "cuda":
        raise ArgumentError("device", "a CUDA device", repr(device))
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def why_not() -> str | None:
    """Why there is no NCCL here; None if there is."""
    try:
        _nccl()
    except ImportError as error:
        return str(error)
    return None


def versions() -> str:
    """Of nccl4py and of the NCCL library that it found."""
    found = _nccl().get_version()
    return f"nccl4py {found.nccl4py}, NCCL {found.libnccl.version if found.libnccl else 'not found'}"


class NcclCommunicator(Checks):
    """See Communicator. Non-blocking: NCCL connects in the background, so that no peer can keep a call from returning.

    That costs a thread of NCCL's own a call. It costs nothing in a CUDA graph. An abort frees the streams at once, but
    returns only when every graph with a collective of the communicator is gone, so it has a thread of its own.
    """

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        size: int,
        device: torch.device,
        deadline_s: float,
        watch: Callable[[], None],
    ) -> None:
        nccl = _nccl()
        _keep_log()
        self.rank, self.size, self.device, self.deadline_s = rank, size, device, deadline_s
        self.watch = watch
        self._abort: threading.Thread | None = None
        self._comm = nccl.Communicator()
        name, config = nccl.UniqueId.from_bytes(unique_id), nccl.NCCLConfig(blocking=False)
        self._call(lambda _: self._comm.initialize(size, rank, name, config), None, "the other ranks did not come")

    def allgather(self, x: Tensor, out: Tensor, stream: Any = None) -> None:
        self.check("x", x)
        self.check("out", out, x, self.size)
        self._enqueue(stream, lambda at: self._comm.allgather(x, out, stream=at))

    def allreduce(self, x: Tensor, out: Tensor, stream: Any = None) -> None:
        self.check("x", x)
        self.check("out", out, x)
        self._enqueue(stream, lambda at: self._comm.allreduce(x, out, _nccl().SUM, stream=at))

    def broadcast(self, x: Tensor, root: int, stream: Any = None) -> None:
        self.check("x", x)
        self.check_peer("root", root, others=False)
        self._enqueue(stream, lambda at: self._comm.broadcast(x, x, root, stream=at))

    def send(self, x: Tensor, peer: int, stream: Any = None) -> None:
        self.check("x", x)
        self.check_peer("peer", peer, others=True)
        self._enqueue(stream, lambda at: self._comm.send(x, peer, stream=at))

    def recv(self, out: Tensor, peer: int, stream: Any = None) -> None:
        self.check("out", out)
        self.check_peer("peer", peer, others=True)
        self._enqueue(stream, lambda at: self._comm.recv(out, peer, stream=at))

    def wait(self, stream: Any = None, meanwhile: Meanwhile | None = None) -> None:
        self.require_live()
        with torch.cuda.device(self.device):
            done = (stream or torch.cuda.current_stream()).record_event()
        self._poll(done.query, "a peer did not take part", meanwhile)

    def async_error(self) -> str | None:
        if self.failure is None and self._comm.is_valid and self._state() not in ("Success", "InProgress"):
            return f"{self._state()}: {self._comm.get_last_error()}"
        return self.failure

    def abort(self) -> None:
        self.failure = self.failure or "aborted"
        if self._abort is None:
            self._abort = threading.Thread(target=_abort, args=(self._comm, self.device), daemon=True)
            self._abort.start()

    def destroy(self) -> None:
        if self._abort is not None:
            self._abort.join(ABORT_S)
            if self._abort.is_alive():
                late = f"still not ended, {ABORT_S:g} s after: {self.failure}"
                raise RuntimeError(f"NCCL on rank {self.rank} is {late}")
            return
        if not self._comm.is_valid:
            return
        # destroy alone would wait for the others without a deadline.
        self._call(lambda _: self._comm.finalize(), None, "the other ranks did not destroy theirs")
        self._comm.destroy()
        self.failure = "destroyed"

    def _enqueue(self, stream: Any, call: Callable[[int], None]) -> None:
        self.require_live()
        self._call(call, stream, "a peer did not connect")

    def _call(self, call: Callable[[int], None], stream: Any, blame: str) -> None:
        """Until NCCL has done, or enqueued, what it was asked for: the stream must not be used before."""
        with torch.cuda.device(self.device):
            at = (stream or torch.cuda.current_stream()).cuda_stream
            try:
                call(at)
            except _errors() as failure:
                raise self._failed(ConnectionError, str(failure)) from None
        self._poll(lambda: self._state() != "InProgress", blame)

    def _state(self) -> str:
        return _bindings().Result(self._comm.get_async_error()).name  # nccl4py says Result, and returns an int

    def _poll(self, done: Callable[[], bool], blame: str, meanwhile: Meanwhile | None = None) -> None:
        start = time.monotonic()
        while True:
            finished, failure = done(), self.async_error()
            if failure:
                raise self._failed(ConnectionError, failure)
            if finished:
                return
            waited = time.monotonic() - start
            if waited > self.deadline_s:
                raise self._failed(TimeoutError, f"{blame} within {self.deadline_s:g} s")
            if meanwhile is not None:
                meanwhile(waited)
            if waited > SPIN_S:
                try:
                    self.watch()
                except OSError as gone:
                    raise self._failed(type(gone), f"{blame}: {gone}") from None
                time.sleep(PAUSE_S)

    def _failed(self, kind: type[OSError], text: str) -> OSError:
        """Abort, and the error that says why. (Whoever raises it keeps no name for it: a frame and an error that hold
        each other hold the caller's graphs too, until the cycle collector comes.)"""
        self.failure = f"NCCL on rank {self.rank}: {text}"
        self.abort()
        return kind(self.failure)


def _abort(comm: Any, device: torch.device) -> None:
    torch.cuda.set_device(device)
    with suppress(*_errors()):
        comm.abort()


class GlooCommunicator(Checks):
    """See Communicator. CPU tensors, processes of one machine."""

    device = torch.device("cpu")

    def __init__(self, unique_id: bytes, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None
        deadline = timedelta(seconds=deadline_s)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = deadline
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]

        def join() -> None:
            port = int(unique_id)
            self._store = _servers.pop(unique_id, None) or dist.TCPStore("127.0.0.1", port, timeout=deadline)
            self._store.set_timeout(deadline)
            self._group = dist.ProcessGroupGloo(self._store, rank, size, options)

        self._guard(join)

    def allgather(self, x: Tensor, out: Tensor, stream: Any = None) -> None:
        self.check("x", x)
        self.check("out", out, x, self.size)
        self._run(lambda group: group._allgather_base(out.view(-1), x.view(-1)))

    def allreduce(self, x: Tensor, out: Tensor, stream: Any = None) -> None:
        self.check("x", x)
        self.check("out", out, x)
        out.view(-1).copy_(x.view(-1))
        self._run(lambda group: group.allreduce([out], dist.AllreduceOptions()))

    def broadcast(self, x: Tensor, root: int, stream: Any = None) -> None:
        self.check("x", x)
        self.check_peer("root", root, others=False)
        self._run(lambda group: group.broadcast(x, root))

    def send(self, x: Tensor, peer: int, stream: Any = None) -> None:
        self.check("x", x)
        self.check_peer("peer", peer, others=True)
        self._run(lambda group: group.send([x], peer, 0))

    def recv(self, out: Tensor, peer: int, stream: Any = None) -> None:
        self.check("out", out)
        self.check_peer("peer", peer, others=True)
        self._run(lambda group: group.recv([out], peer, 0))

    def wait(self, stream: Any = None, meanwhile: Meanwhile | None = None) -> None:
        self.require_live()

    def async_error(self) -> str | None:
        return self.failure

    def abort(self) -> None:
        self.failure = self.failure or "aborted"
        self._group = self._store = None

    def destroy(self) -> None:
        if self._group is not None:
            self._run(lambda group: group.barrier())  # the others may still need the store of the first
            self.abort()
            self.failure = "destroyed"

    def _run(self, call: Callable[[Any], Any]) -> None:
        self.require_live()
        self._guard(lambda: call(self._group).wait())

    def _guard(self, call: Callable[[], None]) -> None:
        """gloo says everything by a RuntimeError."""
        try:
            call()
        except RuntimeError as failure:
            text = re.sub(r"^\[\S+\] ", "", " ".join(str(failure).split())).partition(" This is typically")[0]
            self.failure = f"gloo on rank {self.rank}: {text}"
            self.abort()
            late = re.search("time", text, re.IGNORECASE)
            raise (TimeoutError if late else ConnectionError)(self.failure) from failure


def preflight(comm: Communicator, device: torch.device) -> dict[str, Any]:
    """All-gather a pattern, check it, and time it. Every rank calls it. Raises OSError.

    {"us": {bytes a rank: median of a round in microseconds, host to host}, "paths": how NCCL connects the ranks, for
    example "P2P/CUMEM" or "SHM/direct"; empty for gloo, and where NCCL_DEBUG is the user's own}.
    """
    microseconds = {}
    for count in PREFLIGHT_BYTES:
        pattern = torch.arange(count, device=device)
        shares = [(pattern * 31 + rank * 7).remainder(251).to(torch.uint8) for rank in range(comm.size)]
        out = torch.zeros(comm.size * count, dtype=torch.uint8, device=device)
        rounds = []
        for _ in range(PREFLIGHT_ROUNDS):
            start = time.perf_counter()
            comm.allgather(shares[comm.rank], out)
            comm.wait()
            rounds.append(time.perf_counter() - start)
        for rank, share in enumerate(shares):
            if not torch.equal(out[rank * count : (rank + 1) * count], share):
                raise ConnectionError(f"rank {rank}'s bytes arrived changed on rank {comm.rank}")
        microseconds[str(count)] = round(1e6 * sorted(rounds)[len(rounds) // 2], 1)
    return {"us": microseconds, "paths": sorted(set(re.findall(r" via ((?:P2P|SHM|NET|NVLS)\S*)", _log())))}


@functools.cache
def _nccl() -> Any:
    """nccl4py, once its library is found too. Raises ImportError."""
    try:
        _bindings().get_version()
        return importlib.import_module("nccl.core")
    except (ImportError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        raise ImportError(f"NCCL needs the package nccl4py, pip install 'tpverify[cuda]': {text}") from error


@functools.cache
def _bindings() -> Any:
    return importlib.import_module("nccl.bindings.nccl")


def _errors() -> tuple[type[Exception], ...]:
    """What NCCL's calls raise."""
    return _bindings().NCCLError, _nccl().NcclInvalid


def _keep_log() -> None:
    """Before NCCL's first call: its log goes to memory, for preflight to read, unless the user has plans for it."""
    global _log_file
    if "NCCL_DEBUG" not in os.environ:
        _log_file = os.memfd_create("nccl-log")
        os.environ.update(LOG | {"NCCL_DEBUG_FILE": f"/proc/{os.getpid()}/fd/{_log_file}"})


def _log() -> str:
    """What NCCL has said about its connections in this process."""
    if _log_file is None:
        return ""
    with open(f"/proc/self/fd/{_log_file}", errors="replace") as log:
        return log.read()


_log_file: int | None = None
_servers: dict[bytes, Any] = {}  # of gloo's unique ids that this process gave out and has not used yet
