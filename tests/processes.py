"""Processes that meet as the ranks of a communicator, each with what its body returned or the OSError it ended with."""

import multiprocessing
import multiprocessing.util
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from tpverify import pynccl

START_S = 60.0
GONE = "gone"  # in place of the lost one's result

multiprocessing.util.get_temp_dir()  # made now, where it may stay: tests give themselves folders that must end empty
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tpverify.pynccl"])  # torch is imported once for all


def run_ranks(
    backend: str,
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = 20.0,
    absent: int = 0,
    lost: int | None = None,
) -> list[Any]:
    """body(comm, device, *arguments) on ranks 0..size-1, the last `absent` of which never come. Results in rank order.

    lost: a rank that gives no result, and whose process may hang.
    """
    results, names = _context.Queue(), _context.Queue()
    ranks = [
        _context.Process(target=_rank, args=(backend, rank, size, deadline_s, names, results, body, arguments))
        for rank in range(size - absent)
    ]
    for rank in ranks:
        rank.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + START_S + 3 * deadline_s
    try:
        while waiting := set(range(len(ranks))) - set(found) - {lost}:
            assert time.monotonic() < end, f"no answer from ranks {waiting}"
            with suppress(queue.Empty):
                rank, found[rank] = results.get(timeout=1.0)
        for rank in found:
            ranks[rank].join(START_S)
            assert ranks[rank].exitcode == 0, "a process that has answered does not end"
    finally:
        for process in ranks:
            process.kill()
    return [found.get(rank, GONE) for rank in range(len(ranks))]


def _rank(
    backend: str, rank: int, size: int, deadline_s: float, names: Any, results: Any, body: Callable, arguments: tuple
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    try:
        if rank == 0:
            name = pynccl.unique_id(backend)
            for _ in range(size - 1):
                names.put(name)
        else:
            name = names.get(timeout=START_S)
        start = time.monotonic()
        try:
            comm = pynccl.init(name, rank, size, backend=backend, device=device, deadline_s=deadline_s)
            results.put((rank, body(comm, device, *arguments)))
            comm.destroy()
        except OSError as error:
            results.put((rank, (type(error), str(error), time.monotonic() - start)))
    except Exception as error:
        results.put((rank, repr(error)))
