"""Collectives against numpy, and every way in which a peer can be missing. gloo here; NCCL where there are two GPUs."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from processes import GONE, run_ranks

from tpverify import pynccl
from tpverify.errors import ArgumentError

TOO_FEW = torch.cuda.device_count() < 2
NCCL = pytest.param("nccl", marks=[pytest.mark.multi_gpu, pytest.mark.skipif(TOO_FEW, reason="NOT run: under 2 GPUs")])
BACKENDS = ["gloo", NCCL]
SIZES = {"gloo": 3, "nccl": 2}
COUNTS = (1, 7, 1000, 65_537)  # odd ones: no multiple of a 16-byte access
DEADLINE_S = 3.0
SLACK_S = 12.0  # on a busy machine


def share(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: their sums are exact in every dtype."""
    return torch.from_numpy(np.random.default_rng([rank, count]).integers(0, 16, count)).to(dtype)


def expect(name: str, got: torch.Tensor, expected: np.ndarray) -> None:
    assert np.array_equal(got.float().cpu().numpy(), expected), name


def all_of_them(comm: pynccl.Communicator, device: torch.device) -> list[str]:
    """Every collective with every dtype and count. Returns what was checked."""
    checked = []
    for dtype in pynccl.DTYPES:
        for count in COUNTS:
            name = f"{dtype} {count}"
            shares = [share(rank, count, dtype) for rank in range(comm.size)]
            exact = np.stack([s.float().numpy() for s in shares])
            x, out = (
                shares[comm.rank].to(device, copy=True),
                torch.full((comm.size * count,), 99, dtype=dtype, device=device),
            )
            comm.allgather(x, out)
            comm.wait()
            expect(f"allgather {name}", out, exact.reshape(-1))

            reduced = torch.empty_like(x)
            comm.allreduce(x, reduced)
            comm.wait()
            expect(f"allreduce {name}", reduced, exact.sum(0))
            expect(f"input of allreduce {name}", x, exact[comm.rank])
            comm.allreduce(x, x)
            comm.wait()
            expect(f"allreduce in place {name}", x, exact.sum(0))

            for root in range(comm.size):
                x = shares[comm.rank].to(device, copy=True)
                comm.broadcast(x, root)
                comm.wait()
                expect(f"broadcast {root} {name}", x, exact[root])

            last = comm.size - 1
            if comm.rank == 0:
                comm.send(shares[0].to(device), last)
            elif comm.rank == last:
                x = torch.full((count,), 99, dtype=dtype, device=device)
                comm.recv(x, 0)
            comm.wait()
            if comm.rank == last:
                expect(f"recv {name}", x, exact[0])
            checked.append(name)
    assert comm.async_error() is None
    return checked


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_against_numpy(backend: str) -> None:
    names = [f"{dtype} {count}" for dtype in pynccl.DTYPES for count in COUNTS]
    assert run_ranks(backend, SIZES[backend], all_of_them) == [names] * SIZES[backend]


def wrong_arguments(comm: pynccl.Communicator, device: torch.device) -> dict[str, str]:
    """The refusals, none of which reaches a peer: the last gather shows that the ranks are still in step."""
    x = torch.zeros(4, device=device)
    calls: dict[str, Any] = {
        "float64": lambda: comm.allgather(x.double(), x.double()),
        "strided": lambda: comm.broadcast(torch.zeros(4, 2, device=device)[:, 0], 0),
        "elsewhere": lambda: comm.send(torch.zeros(4, device="meta"), 1 - comm.rank),
        "too small": lambda: comm.allgather(x, x),
        "other dtype": lambda: comm.allreduce(x, x.half()),
        "root": lambda: comm.broadcast(x, comm.size),
        "itself": lambda: comm.recv(x, comm.rank),
        "no tensor": lambda: comm.allreduce([1.0], x),
    }
    refused = {}
    for name, call in calls.items():
        try:
            call()
        except ArgumentError as error:
            refused[name] = error.argument
    out = torch.zeros(4 * comm.size, device=device)
    comm.allgather(x + comm.rank, out)
    comm.wait()
    expect("a gather afterwards", out, np.repeat(np.arange(comm.size), 4))
    return refused


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_are_refused_before_anything_is_sent(backend: str) -> None:
    expected = {
        "float64": "x", "strided": "x", "elsewhere": "x", "too small": "out", "other dtype": "out", "root": "root",
        "itself": "peer", "no tensor": "x",
    }  # fmt: skip
    assert run_ranks(backend, 2, wrong_arguments) == [expected] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_peer_that_never_comes_is_a_timeout(backend: str) -> None:
    """nccl#289: building a communicator hung when a rank had died."""
    ((kind, text, seconds),) = run_ranks(backend, 2, all_of_them, deadline_s=DEADLINE_S, absent=1)
    assert kind is TimeoutError and "rank 0" in text and seconds < DEADLINE_S + SLACK_S


def die_in_a_collective(comm: pynccl.Communicator, device: torch.device, how: int) -> tuple[type, float]:
    """The last rank takes part once, then ends, or stops, while the others wait for it in the next collective."""
    x, out = torch.ones(1000, device=device), torch.zeros(1000 * comm.size, device=device)
    comm.allgather(x, out)
    comm.wait()
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), how)
        time.sleep(60)
    start = time.monotonic()
    try:
        comm.allgather(x, out)
        comm.wait()
    except OSError as error:
        seconds = time.monotonic() - start
        assert comm.async_error()
        try:
            comm.allgather(x, out)
        except ConnectionError:
            comm.abort()
            return type(error), seconds
    raise AssertionError("a collective without all ranks, or after a failure")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_peer_that_ends_or_hangs_in_a_collective(backend: str, how: signal.Signals) -> None:
    """pytorch#118692, nccl#1013: the survivors waited for good."""
    size = SIZES[backend]
    *survivors, lost = run_ranks(backend, size, die_in_a_collective, how, deadline_s=DEADLINE_S, lost=size - 1)
    assert lost == GONE
    for kind, seconds in survivors:
        assert issubclass(kind, OSError) and seconds < DEADLINE_S + SLACK_S


def abort_in_a_collective(comm: pynccl.Communicator, device: torch.device) -> tuple[type, float] | None:
    """The last rank takes part once, then aborts, and lives on; the others wait for it in the next collective."""
    x, out = torch.ones(1000, device=device), torch.zeros(1000 * comm.size, device=device)
    comm.allgather(x, out)
    comm.wait()
    if comm.rank == comm.size - 1:
        comm.abort()
        assert comm.async_error() == "aborted"
        time.sleep(DEADLINE_S + 2)
        return None
    start = time.monotonic()
    try:
        comm.allgather(x, out)
        comm.wait()
    except OSError as error:
        return type(error), time.monotonic() - start
    raise AssertionError("a collective without all ranks")


@pytest.mark.parametrize("backend", BACKENDS)
def test_peer_that_aborts_while_others_gather(backend: str) -> None:
    """An abort is a rank's own affair: its peers learn of it by a closed connection, or by their deadline."""
    *survivors, aborted = run_ranks(backend, SIZES[backend], abort_in_a_collective, deadline_s=DEADLINE_S)
    assert aborted is None
    for kind, seconds in survivors:
        assert issubclass(kind, OSError) and seconds < DEADLINE_S + SLACK_S


def leave_twice(comm: pynccl.Communicator, device: torch.device) -> list[str]:
    comm.destroy()
    comm.destroy()
    comm.abort()
    said = []
    for call in (lambda: comm.broadcast(torch.zeros(1, device=device), 0), comm.wait):
        try:
            call()
        except ConnectionError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_destroy_twice_and_nothing_afterwards(backend: str) -> None:
    for said in run_ranks(backend, 2, leave_twice):
        assert len(said) == 2 and all("has ended" in text for text in said)


def check_paths(comm: pynccl.Communicator, device: torch.device) -> dict[str, Any]:
    return pynccl.preflight(comm, device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_preflight_says_how_long_and_which_way(backend: str) -> None:
    for found in run_ranks(backend, 2, check_paths):
        assert list(found["us"]) == ["65536", "1048576"] and all(us > 0 for us in found["us"].values())
        assert bool(found["paths"]) == (backend == "nccl")


class Corrupting:
    """A communicator of one process that has two, and flips a bit of the other's share."""

    rank, size = 0, 2

    def allgather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        count = torch.arange(len(x))
        out[: len(x)] = x
        out[len(x) :] = (count * 31 + 7).remainder(251)
        out[-5] ^= 1

    def wait(self) -> None:
        pass


def test_preflight_finds_one_bit() -> None:
    with pytest.raises(ConnectionError, match="rank 1's bytes arrived changed on rank 0"):
        pynccl.preflight(Corrupting(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"rank": 2}, "rank"),
        ({"rank": True}, "rank"),
        ({"size": 0}, "size"),
        ({"unique_id": "1"}, "unique_id"),
        ({"backend": "mpi"}, "backend"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_bad_arguments(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        pynccl.init(**({"unique_id": b"1", "rank": 0, "size": 2, "backend": "gloo"} | options))
    assert error.value.argument == argument


def test_without_nccl4py_one_line_names_it() -> None:
    script = "import sys; sys.modules['nccl'] = None; from tpverify import pynccl; print(pynccl.why_not())"
    command = script + "\ntry: pynccl.unique_id()\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first == second and "package nccl4py" in first and "tpverify[cuda]" in first
