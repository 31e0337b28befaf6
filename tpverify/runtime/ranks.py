"""A group of ranks: Ray actors on this node, started once, stepped together, torn down together."""

import atexit
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import tpverify
from tpverify.config import DEVICES, check_choice, check_deadline, check_int, check_type
from tpverify.errors import ClusterError, RankFailure
from tpverify.runtime import cluster, messages
from tpverify.runtime.actor import Rank
from tpverify.runtime.connection import ECHOES
from tpverify.runtime.device import Place, choose
from tpverify.runtime.messages import Frame, Ping, Preflight, Reply, Step
from tpverify.runtime.rehearsal import Rehearsal
from tpverify.runtime.transport import CALLS, RayTransport, SocketTransport, Transport

TRANSPORTS: dict[str, Callable[[int, float], Transport]] = {"socket": SocketTransport, "ray": RayTransport}
CONTROL = "control"  # the concurrency group that answers while a step runs
RENDEZVOUS = "rendezvous"  # the socket at which ranks meet, in a directory of ours
START_DEADLINE_S = 120.0  # to start a process and import torch, which many ranks do at once on few cores
NO_PEER_TO_PEER = {"NCCL_P2P_DISABLE": "1"}  # what NCCL is told where GPUs cannot reach each other's memory
SPIN_S = 0.05  # how long to look for the answers of GPU ranks without sleeping: a step is over by then
POLL_S = 0.05  # how long a dead rank can go unnoticed
BLAME_S = 1.0  # how long to look for the cause behind an error or a silence
LOST_S = 4.0  # how long, for the lost peer because of which a rank could not go on
KILL_S = 2.0  # what Ray gets to end a process before we do
REAP_S = 10.0  # what the kernel gets, on a busy machine, after that


class RankLost(RankFailure):
    """The rank's process is gone or hangs; what the other ranks have is as it should be."""


@contextmanager
def meeting() -> Iterator[str]:
    """The path at which ranks meet, in a directory of ours. With its removal the meeting is over, or called off."""
    with tempfile.TemporaryDirectory(prefix="tpverify-") as directory:
        yield os.path.join(directory, RENDEZVOUS)


class Answer(NamedTuple):
    """A rank's reply and the raw frames that came with it."""

    reply: Reply
    frames: list[memoryview]

    def result(self) -> Any:
        """What the worker's `handle` returned beside the frames."""
        return msgspec.msgpack.decode(self.reply.result)


class RankGroup:
    """`size` ranks on the driver's node, each an actor with one torch thread, or with a GPU of its own.

    device: "auto" takes GPUs if the node has one for every rank. deadline_s bounds the wait for a place and every step.
    oversubscribe: ranks share GPUs, for parity tests only. transport: "socket", or "ray" for plain actor calls.
    device_reason: why "auto" took CPUs. collectives: what carries a step's results; for "nccl" by which paths, whether
    GPUs read each other's memory, and microseconds of an all-gather by bytes a rank. generation: how often processes
    were started.
    After any failure, Ctrl-C included, everything is released, and a new group can start on the same cluster.
    Raises ArgumentError, ClusterError (no place for the ranks), RankFailure (a rank did not start).
    """

    generation = 0

    def __init__(
        self,
        size: int,
        device: str = "auto",
        deadline_s: float = 30.0,
        transport: str = "socket",
        oversubscribe: bool = False,
    ) -> None:
        self.size, self.deadline_s = check_int("size", size, 1, 1024), check_deadline(deadline_s)
        check_choice("device", device, DEVICES)
        check_choice("transport", transport, list(TRANSPORTS))
        check_type("oversubscribe", oversubscribe, bool, "a bool")
        self._driver = os.getpid()
        self.closed = False
        self.coordinator: Any = None  # the one whose log the ranks follow
        self.pids: list[int] = []
        self._actors: list[Any] = []
        self._sentinels: list[Any] = []
        self._owing: set[int] = set()  # ranks that have not answered the last message
        self.answers: dict[int, Answer] = {}  # of the others to it, by rank
        self._resources = ExitStack()  # unwound by close(), last acquired first
        atexit.register(self.close)
        with self.closed_by_failure():
            self._start(device, TRANSPORTS[transport], oversubscribe)

    def _start(self, device: str, transport: Callable[[int, float], Transport], oversubscribe: bool) -> None:
        cluster.check_socket_path(os.path.join(tempfile.gettempdir(), "tpverify-01234567", RENDEZVOUS))
        self._resources.enter_context(cluster.session())
        place = choose(self.size, device, oversubscribe, cluster.this_node().gpus)
        self.device, self.device_reason = place.device, place.reason
        self.collectives: dict[str, Any] = {"backend": "sockets"}
        bundles = self._resources.enter_context(cluster.placement(self.size, place.gpus, self.deadline_s))
        running = self._resources.enter_context(ExitStack())
        self._start_ranks(running, transport, bundles, place, {})
        if place.nccl and "hung" in self._preflight(True):
            running.close()
            self._start_ranks(running, transport, bundles, place, NO_PEER_TO_PEER)
            if "hung" in self._preflight(False):
                raise RankFailure(0, 0, f"with and without peer-to-peer: {self.collectives['hung']}")

    def _start_ranks(
        self,
        running: ExitStack,
        transport: Callable[[int, float], Transport],
        bundles: Any,
        where: Place,
        environment: dict[str, str],
    ) -> None:
        """running: unwound, it ends them."""
        self._actors, self._sentinels, self.pids = [None] * self.size, [None] * self.size, [0] * self.size
        self.transport = transport(self.size, SPIN_S if where.device == "cuda" else 0.0)
        if where.device == "cuda":
            self.transport.meanwhile = Rehearsal()
        running.callback(self.transport.close)
        running.callback(self.end, range(self.size))
        # A rank waits for its peers longer than the driver does for it, so that the driver is first to say who is late.
        peer_timeout_s = max(START_DEADLINE_S, 2 * self.deadline_s)
        root = str(Path(tpverify.__file__).parent.parent)
        groups = {CONTROL: 1, CALLS: 1}
        actor = ray.remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0)(Rank)  # type: ignore[call-overload]

        def new_actor(rank: int) -> Any:
            place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
            options = actor.options(num_cpus=0, num_gpus=where.gpus, scheduling_strategy=place)
            return options.remote(root, rank, where.device, where.nccl, peer_timeout_s, environment)

        self._new_actor = new_actor
        self.start_anew(range(self.size))

    def start_anew(self, ranks: Sequence[int]) -> None:
        """Start processes for these ranks, which have none or have lost theirs; returns when they answer. RankFailure
        for one that does not."""
        self.generation += 1
        for rank in ranks:
            self.pids[rank] = 0
            self._actors[rank] = self._new_actor(rank)
            self._sentinels[rank] = self.transport.start(rank, self._actors[rank])
        self.attempt(Step(0, 1, [], Ping()), (), None, ranks, START_DEADLINE_S)
        for rank, pid in zip(ranks, self._collect_pids(ranks), strict=True):
            self.pids[rank] = pid

    def _preflight(self, peer_to_peer: bool) -> dict[str, Any]:
        with meeting() as rendezvous:
            work = Preflight(self.size, rendezvous)
            answers = self.call(Step(0, 1, [], work), deadline_s=START_DEADLINE_S)
        found = [answer.result() for answer in answers]
        hung = [result for result in found if "hung" in result]
        self.collectives = {"backend": "nccl", "peer_to_peer": peer_to_peer} | (hung or found)[0]
        return self.collectives

    def call(
        self,
        step: Step,
        frames: Sequence[Frame] = (),
        own: Sequence[Sequence[Frame]] | None = None,
        tp: int | None = None,
        deadline_s: float | None = None,
    ) -> list[Answer]:
        """Send `step` to ranks 0..tp-1 (default: all) and return their answers in rank order.

        frames go to every rank, then own[rank] to that rank alone. Buffers must stay as they are until this returns.
        Raises RankFailure, after closing the group, when a rank answers an error, dies, or is silent past the deadline.
        """
        with self.closed_by_failure():
            return self.attempt(step, frames, own, range(tp or self.size), deadline_s)

    @contextmanager
    def closed_by_failure(self) -> Iterator[None]:
        """Whatever is raised within closes the group: a half-done step leaves ranks that wait for each other. What the
        system refuses the driver (a descriptor, a directory of temporary files) is a ClusterError."""
        self.require_open()
        try:
            yield
        except OSError as failure:
            self.close()
            raise ClusterError(f"no way from this process to its ranks: {failure}") from failure
        except BaseException:
            self.close()
            raise

    def attempt(
        self,
        step: Step,
        frames: Sequence[Frame] = (),
        own: Sequence[Sequence[Frame]] | None = None,
        ranks: Sequence[int] = (),
        deadline_s: float | None = None,
    ) -> list[Answer]:
        """`call` of these ranks that leaves the group open: after RankLost, whoever lives may still owe an answer."""
        message = messages.encode(step)
        self._owing, self.answers = set(ranks), {}
        for rank in ranks:
            self.transport.send(rank, [message, *frames, *(own[rank] if own else ())])
        return self._collect(step.number, ranks, deadline_s or self.deadline_s)

    def drain(self, number: int, deadline_s: float) -> list[int]:
        """After RankLost, and the end of what was lost: wait for `answers` of the others. Returns ranks without one;
        RankLost for one more that dies."""
        end = time.monotonic() + deadline_s
        while self._owing and time.monotonic() < end:
            for rank in sorted(self._owing):
                self._take(rank, number, POLL_S)
            self._look_for_dead(number, 0.0)
        return sorted(self._owing)

    def hung(self, ranks: Sequence[int]) -> list[int]:
        """Those whose process does not even answer a ping."""
        pings = [self._ping(rank) for rank in ranks]
        alive, _ = ray.wait(pings, num_returns=len(pings), timeout=BLAME_S)
        return [rank for rank, ping in zip(ranks, pings, strict=True) if ping not in alive]

    def require_open(self) -> None:
        """Raise ClusterError if the group is closed, or another process's, from which this one was forked."""
        if self.closed:
            raise ClusterError("this group of ranks is closed: start another")
        if os.getpid() != self._driver:
            raise ClusterError(f"this group of ranks is process {self._driver}'s, of which this one is a fork")

    def fail(self, rank: int, step: int, cause: str) -> RankFailure:
        """Close the group, and return the error that says why."""
        self.close()
        return RankFailure(rank, step, cause)

    def close(self) -> None:
        """End the ranks and release everything. Can be called again."""
        if os.getpid() != self._driver:  # a fork of it: these are not its ranks, and Ray's calls never return there
            return
        self.closed = True
        self._resources.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ping(self, rank: int) -> Any:
        return self._actors[rank].ping.options(concurrency_group=CONTROL).remote()

    def _collect_pids(self, ranks: Sequence[int]) -> list[int]:
        pids = []
        for rank, ping in [(rank, self._ping(rank)) for rank in ranks]:
            try:
                pids.append(ray.get(ping, timeout=START_DEADLINE_S))
            except ray.exceptions.GetTimeoutError:
                raise RankFailure(rank, 0, f"no answer to a ping within {START_DEADLINE_S:g} s") from None
            except ray.exceptions.RayError as failure:
                raise RankFailure(rank, 0, _cause_of_death(failure)) from failure
        return pids

    def _collect(self, number: int, ranks: Sequence[int], deadline_s: float) -> list[Answer]:
        end = time.monotonic() + deadline_s
        for rank in ranks:
            while not self._receive(rank, number, POLL_S):
                late = [other for other in ranks if not self._receive(other, number, 0.0)]
                self._look_for_dead(number, 0.0)
                if late and time.monotonic() > end:
                    self._raise_late(late, number, deadline_s)
        errors = [(rank, text) for rank in ranks if (text := self.answers[rank].reply.error) is not None]
        if errors:
            self._look_for_dead(number, LOST_S)
            rank, text = min(errors, key=lambda error: error[1].startswith(tuple(echo.__name__ for echo in ECHOES)))
            raise RankFailure(rank, number, text)
        return [self.answers[rank] for rank in ranks]

    def _receive(self, rank: int, number: int, timeout_s: float) -> bool:
        """Whether the rank has answered, now or before."""
        if rank not in self._owing:
            return True
        reply = self._take(rank, number, timeout_s)
        if reply is None:
            return False
        if reply.error is not None and not reply.interrupted:
            self._look_for_dead(number, BLAME_S)  # a rank's error is often the echo of a peer's death
            raise RankFailure(rank, number, reply.error)
        if reply.number != number:
            raise RankFailure(rank, number, f"answered step {reply.number}")
        return True

    def _take(self, rank: int, number: int, timeout_s: float) -> Reply | None:
        """The rank's reply, into `answers`; None if there is none in time. RankFailure for what is no reply."""
        try:
            message = self.transport.receive(rank, timeout_s)
            if message is None:
                return None
            reply = messages.decode_reply(message[0])
        except (ValueError, IndexError, msgspec.DecodeError) as failure:
            raise RankFailure(rank, number, f"its answer is no reply: {failure}") from failure
        self.answers[rank] = Answer(reply, message[1:])
        self._owing.discard(rank)
        return reply

    def _look_for_dead(self, number: int, timeout_s: float) -> None:
        ended, _ = ray.wait([living for living in self._sentinels if living is not None], timeout=timeout_s)
        for reference in ended:
            try:
                ray.get(reference)
            except Exception as failure:
                raise RankLost(self._sentinels.index(reference), number, _cause_of_death(failure)) from failure

    def _raise_late(self, late: list[int], number: int, deadline_s: float) -> None:
        """Of the ranks without an answer, blame one whose process does not even answer a ping."""
        for rank in self.hung(late):
            raise RankLost(rank, number, f"no answer within {deadline_s:g} s, nor to a ping: the process hangs")
        raise RankLost(late[0], number, f"no answer within {deadline_s:g} s; the process still answers a ping")

    def end(self, ranks: Sequence[int]) -> None:
        """End these ranks' processes, and return when they are gone. Those that were ended before stay so."""
        ranks = [rank for rank in ranks if self._sentinels[rank] is not None]
        self._owing -= set(ranks)
        for rank in ranks:
            self._sentinels[rank] = None
        with ExitStack() as handles:
            pids = [self.pids[rank] for rank in ranks if self.pids[rank]]
            processes = [process for pid in pids if (process := _process(pid, handles)) is not None]
            for rank in ranks:
                with suppress(Exception):  # Ray itself may be gone
                    ray.kill(self._actors[rank])
            for process in _not_ended(processes, KILL_S):  # stopped or stuck in a driver
                signal.pidfd_send_signal(process, signal.SIGKILL)
            _not_ended(processes, REAP_S)


def _process(pid: int, handles: ExitStack) -> int | None:
    """A handle of the process that no later process with the same pid can take over.

    None if it is gone, or if the kernel has no such handles: Ray alone ends it then.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    handles.callback(os.close, handle)
    return handle


def _not_ended(processes: list[int], timeout_s: float) -> list[int]:
    end = time.monotonic() + timeout_s
    poll = select.poll()  # which takes any number of a descriptor; select none from 1,024 on
    for process in processes:
        poll.register(process, select.POLLIN)
    while processes and (left := end - time.monotonic()) > 0:
        for process, _ in poll.poll(left * 1000):
            poll.unregister(process)
            processes = [other for other in processes if other != process]
    return processes


def _cause_of_death(failure: Exception) -> str:
    """What Ray knows about the end of a rank, without its general advice."""
    reason = str(failure).strip().splitlines()[-1]
    return "its process is gone: " + reason.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
