"""One rank: applies the log, hands the work to its worker, answers with its digest."""

import gc
import importlib
import time
import traceback
from typing import Any, Protocol

import msgspec

from tpverify.kv.log import Replica
from tpverify.runtime import messages
from tpverify.runtime.connection import ECHOES
from tpverify.runtime.messages import (
    Configure,
    ContentDigest,
    Frame,
    Join,
    Ping,
    Preflight,
    Refill,
    Reply,
    RowHashes,
    Step,
    Work,
)

# Imported when first configured: a rank without a worker ("tables") replays the log and needs no torch.
WORKERS = {
    "attention": "tpverify.runtime.attention_worker:AttentionWorker",
    "decoder": "tpverify.runtime.decoder_worker:DecoderWorker",
    "stack": "tpverify.runtime.stack_worker:StackWorker",
    "gpu_decoder": "tpverify.runtime.gpu_decoder_worker:GpuDecoderWorker",
}
TABLES = "tables"
PREFLIGHT_S = 30.0  # for NCCL to connect and to gather
PEER_GONE = (ConnectionError, TimeoutError)  # what a communicator raises when a peer is lost


class Worker(Protocol):
    """What a rank computes. Built as Worker(comm, device, options), or with an earlier worker's `kept` after these.

    kept: moves.Kept, all that it has by slot. Its rows are moved before anything else is read or written.
    """

    kept: Any

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        """The result, which msgpack must be able to encode, and the frames of the reply."""


class RankServer:
    """Turns the frames of a Step into the frames of a Reply. Whatever goes wrong is an error text in the reply."""

    def __init__(self, rank: int, device: str, nccl: bool, timeout_s: float) -> None:
        """device: as torch calls it. nccl: the ranks have a GPU each, and gather by NCCL. timeout_s: for peers."""
        self.rank, self.device, self.nccl, self.timeout_s = rank, device, nccl, timeout_s
        self.replica: Replica | None = None
        self.worker: Worker | None = None
        self.kept: Any = None  # the worker's, also while there is none
        self.comm: Any = None
        self._joined: dict[int, Any] = {}  # by number of ranks: NCCL's communicators serve every later Configure
        self._generation = 0  # that they are of

    def answer(self, message: list[memoryview]) -> list[Frame]:
        number, digest, moved, error, result, working, interrupted = -1, "", "", None, None, False, False
        frames: list[Frame] = []
        seconds: dict[str, float] = {}
        start = time.perf_counter()
        try:
            step = messages.decode_step(message[0])
            number = step.number
            digest = self._apply(step)
            seconds["log"] = time.perf_counter() - start
            moved = self._move()
            seconds["move"] = time.perf_counter() - start - seconds["log"]
            working = True
            result, frames = self._handle(step.work, message[1:])
        except Exception as failure:  # the boundary of the process: the coordinator decides what an error means
            error = f"{type(failure).__name__}: {failure}"
            if not isinstance(failure, msgspec.MsgspecError):
                traceback.print_exc()
            if working and self.comm is not None:
                interrupted = isinstance(failure, PEER_GONE)
                self.comm.destroy()  # so that no peer waits for what does not come
        seconds["total"] = time.perf_counter() - start
        reply = Reply(number, self.rank, digest, error, msgspec.msgpack.encode(result), seconds, moved, interrupted)
        return [messages.encode(reply), *frames]

    def _apply(self, step: Step) -> str:
        if isinstance(step.work, Configure):
            self.replica = Replica(step.work.num_slots)
        if isinstance(step.work, Join) and self.replica is None:
            self.replica = Replica.restore(step.work.configure.num_slots, step.work.snapshot)
        if self.replica is None:
            return ""
        self.replica.apply(step.log_first, step.entries)
        return self.replica.digest()  # of all it holds: an entry that only this rank applied shows

    def _move(self) -> str:
        if self.kept is None or self.replica is None:
            return ""
        moved = " ".join(self.kept.move(src, dst, self.replica) for src, dst in self.replica.take_moves())
        if (limit := self.replica.take_release()) is not None:
            self.kept.release(limit)
        return moved

    def _handle(self, work: Work, frames: list[memoryview]) -> tuple[Any, list[Frame]]:
        if isinstance(work, Ping):
            return None, list(frames)
        if isinstance(work, Configure):
            self._configure(work)
            return None, []
        if isinstance(work, Join):
            self._join(work.configure)
            return None, []
        if isinstance(work, Preflight):
            return self._preflight(work), []
        if self.worker is None or self.replica is None:
            raise RuntimeError(f"this rank has no worker for {type(work).__name__}")
        if isinstance(work, Refill):
            self.kept.refill(work, self.comm, self.replica)
            return None, []
        if isinstance(work, ContentDigest | RowHashes):
            return self.kept.answer(work, self.replica), []
        return self.worker.handle(work, frames, self.replica)

    def _configure(self, work: Configure) -> None:
        if self.comm is not None:
            self.comm.destroy()
        self.worker = self.kept = self.comm = None  # frees the old pool before the new one is built
        if work.kind != TABLES:
            self._build(work)

    def _build(self, work: Configure) -> None:
        from tpverify.runtime.comm import GpuComm, SocketComm, join_nccl

        module, name = WORKERS[work.kind].split(":")
        build = getattr(importlib.import_module(module), name)
        self._forget_earlier_than(work.generation)
        self.comm = sockets = SocketComm(work.rendezvous, self.rank, work.tp, self.timeout_s)
        if self.device != "cpu":
            if self.nccl and work.tp > 1 and work.tp not in self._joined:
                self._joined[work.tp] = join_nccl(sockets, self.device, self.timeout_s)
            self.comm = GpuComm(sockets, self._joined.get(work.tp))
        earlier = [] if self.kept is None else [self.kept]
        self.worker = build(self.comm, self.device, work.options, *earlier)
        self.kept = self.worker.kept

    def _join(self, work: Configure) -> None:
        if self.kept is None:
            self._configure(work)
        elif self.nccl and work.tp > 1:
            self.comm.destroy()
            self.worker = None  # its graphs hold the communicator that is to end
            self._build(work)
        else:
            self.comm.connect(work.rendezvous)

    def _forget_earlier_than(self, generation: int) -> None:
        """End the communicators that have lost a rank. No worker is left whose graphs hold them."""
        if self._joined and generation != self._generation:
            gc.collect()  # what was built in vain, and holds itself together with the error that ended it
            for nccl in self._joined.values():
                nccl.abort()
            for nccl in self._joined.values():
                nccl.destroy()
            self._joined = {}
        self._generation = generation

    def _preflight(self, work: Preflight) -> dict[str, Any]:
        from tpverify import pynccl
        from tpverify.runtime.comm import SocketComm, join_nccl

        sockets = SocketComm(work.rendezvous, self.rank, work.tp, self.timeout_s)
        try:
            comm = join_nccl(sockets, self.device, PREFLIGHT_S)
            found = pynccl.preflight(comm, comm.device)
            comm.destroy()
            return found
        except (TimeoutError, *ECHOES) as late:  # of a peer that gave up first, too
            return {"hung": str(late)}
        finally:
            sockets.destroy()
