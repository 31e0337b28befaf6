"""Ranks that meet their fate at a chosen place, and what is written down about the error that it ends with."""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from tpverify.runtime.actor import Rank

PLACES = {
    "start": None,  # before anything else
    "configure": "tpverify.runtime.comm:SocketComm.__init__",
    "NCCL init": "tpverify.pynccl:init",
    "gather": "tpverify.runtime.comm:SocketComm.gather",
    "NCCL gather": "tpverify.runtime.comm:GpuComm.gather",
}


def faulty(fated: int, place: str, fate: str, after: int = 0) -> type:
    """A Rank that, as number `fated`, is killed, stopped, or has NCCL report an error, `after` passes of the place."""
    target = PLACES[place]

    def meet() -> None:
        if fate == "NCCL error":
            nccl = importlib.import_module("tpverify.pynccl").NcclCommunicator
            nccl._state = lambda _: "SystemError"
        else:
            os.kill(os.getpid(), signal.Signals[fate])
            time.sleep(5)  # which takes this thread a moment

    class FaultyRank(Rank):
        def __init__(self, root: str, rank: int, *arguments: Any) -> None:
            if rank == fated and target is None:
                meet()
            super().__init__(root, rank, *arguments)
            if rank == fated and target is not None:
                module, _, path = target.partition(":")
                *outer, name = path.split(".")
                owner = importlib.import_module(module)
                for part in outer:
                    owner = getattr(owner, part)
                inner, passes = getattr(owner, name), iter(range(after))

                def wrapped(*arguments: Any, **options: Any) -> Any:
                    if next(passes, None) is None:
                        meet()
                    return inner(*arguments, **options)

                setattr(owner, name, wrapped)

    return FaultyRank


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have the tests on their path


@contextmanager
def ends_with(
    kind: type[Exception], match: str, fault: str, limit_s: float, note: Callable[[str, object], None]
) -> Iterator[None]:
    """The body raises `kind` within limit_s: from the step that fails, or from the start of ranks that fail in it.

    note: record_property; the row of the fault table is printed too."""
    start = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        yield
    seconds = round(time.monotonic() - start, 2)
    row = {"fault": fault, "error": f"{kind.__name__}: {caught.value}", "seconds": seconds}
    note("fault", json.dumps(row))
    print(json.dumps(row))
    assert seconds < limit_s
