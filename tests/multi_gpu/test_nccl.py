"""NCCL in CUDA graphs, on streams of one's own. What it shares with gloo is in tests/runtime/test_pynccl.py."""

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from processes import GONE, run_ranks

from tpverify import pynccl

TOO_FEW = torch.cuda.device_count() < 2
pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(TOO_FEW, reason="NOT run: under 2 GPUs")]
COUNT = 4097
STEPS = 20


def replay(comm: pynccl.Communicator, device: torch.device) -> int:
    """Every collective in one graph, replayed over new inputs. Returns how many values were wrong."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    x = torch.zeros(COUNT, device=device)
    gathered, reduced = torch.empty(comm.size * COUNT, device=device), torch.empty(COUNT, device=device)
    shared, received = torch.empty(COUNT, device=device), torch.empty(COUNT, device=device)
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        shared.copy_(x)
        comm.allgather(x, gathered)
        comm.allreduce(x, reduced)
        comm.broadcast(shared, 1)
        comm.send(x, 1) if comm.rank == 0 else comm.recv(received, 0)

    with torch.cuda.stream(stream):
        step()  # connects
        comm.wait()
        with torch.cuda.graph(graph, stream=stream):
            step()
        wrong = 0
        for number in range(STEPS):
            shares = [np.random.default_rng([number, rank]).integers(0, 99, COUNT) for rank in range(comm.size)]
            x.copy_(torch.from_numpy(shares[comm.rank]))
            graph.replay()
            comm.wait()
            pairs = [(gathered, np.concatenate(shares)), (reduced, sum(shares)), (shared, shares[1])]
            pairs += [(received, shares[0])] * comm.rank
            wrong += sum(int((got.cpu().numpy() != expected).sum()) for got, expected in pairs)
    return wrong


def test_collectives_in_a_graph() -> None:
    assert run_ranks("nccl", 2, replay) == [0, 0]


def other_stream(comm: pynccl.Communicator, device: torch.device) -> bool:
    """The gather reads what its own stream wrote just before, however long that takes."""
    stream = torch.cuda.Stream(device)
    x, out = torch.zeros(1 << 20, device=device), torch.zeros(comm.size << 20, device=device)
    torch.cuda.synchronize(device)
    for number in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            x.fill_(number + comm.rank)
        comm.allgather(x, out, stream)
        comm.wait(stream)
        if not torch.equal(out.view(comm.size, -1)[:, -1].cpu(), torch.arange(comm.size) + float(number)):
            return False
    return True


def test_a_collective_follows_its_stream() -> None:
    assert run_ranks("nccl", 2, other_stream) == [True, True]


def lose_a_peer_in_a_graph(comm: pynccl.Communicator, device: torch.device, how: int) -> dict[str, float]:
    """The last rank takes part once, then ends, or stops. The first waits for it within a graph, until it is told; its
    communicator ends with the graph, and a new one, of what is left, works on the same streams. Seconds by part."""
    torch.cuda.set_device(device)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    x, out, after = (torch.zeros(n, device=device) for n in (COUNT, comm.size * COUNT, COUNT))

    def step() -> None:
        comm.allgather(x, out)
        after.copy_(x + 1)

    with torch.cuda.stream(stream):
        step()
        comm.wait()
        with torch.cuda.graph(graph, stream=stream):
            step()
        graph.replay()
        comm.wait()
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), how)
        time.sleep(60)
    told, seconds, mark = time.monotonic() + 1.0, {}, time.monotonic()

    def watch() -> None:
        if time.monotonic() > told:
            raise ConnectionResetError("the peer is gone")

    def lap(name: str) -> None:
        nonlocal mark
        seconds[name], mark = time.monotonic() - mark, time.monotonic()
        print(f"rank {comm.rank}, {name}: {seconds[name]:.2f} s", flush=True)

    comm.watch = watch  # type: ignore[attr-defined]
    with torch.cuda.stream(stream):
        x.fill_(7)
        graph.replay()
        raised = error_of(comm.wait)
        assert isinstance(raised, OSError), raised
    lap(f"wait ({raised})")
    stream.synchronize()
    assert (after == 8).all(), "the rest of the graph has run"
    lap("the stream is free")
    pynccl.ABORT_S = 1.0
    lap(f"a graph holds it ({error_of(comm.destroy)})")
    graph.reset()
    pynccl.ABORT_S = 20.0
    comm.destroy()
    lap("it ends with the graph")
    alone = pynccl.init(pynccl.unique_id(), 0, 1, device=device)
    with torch.cuda.stream(stream):
        alone.allgather(x, after)
        alone.wait()
    assert (after == 7).all()
    alone.destroy()
    lap("a new one")
    return {name.partition(" (")[0]: value for name, value in seconds.items()}


def error_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except (OSError, RuntimeError) as error:
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_peer_lost_in_a_graph(how: signal.Signals) -> None:
    seconds, lost = run_ranks("nccl", 2, lose_a_peer_in_a_graph, how, lost=1)
    print(seconds)
    assert lost == GONE and isinstance(seconds, dict), seconds
    assert seconds["wait"] < 10 and seconds["the stream is free"] < 5 and seconds["it ends with the graph"] < 10
    assert seconds["a graph holds it"] > 0.9
