"""NCCL in CUDA graphs, on streams of one's own. What it shares with gloo is in tests/runtime/test_pynccl.py."""

import numpy as np
import pytest
import torch
from processes import run_ranks

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
