"""The Ray actor around a RankServer, and its way to the package that the driver runs."""

import os
import sys
import threading
from typing import Any

import ray


class Rank:
    """One rank. `run`, or `idle` in its place, never returns: its reference tells the driver that the rank lives."""

    def __init__(
        self, root: str, rank: int, device: str, nccl: bool, timeout_s: float, environment: dict[str, str]
    ) -> None:
        """root: the directory of the driver's package; a Ray that it joined need not have it on its own path.

        device: "cpu", or "cuda" for the GPU that Ray chose. environment: what NCCL is to find.
        """
        if root not in sys.path:
            sys.path.insert(0, root)
        os.environ.update(environment)
        from tpverify.native import keep_freed_memory
        from tpverify.runtime.device import own_gpu
        from tpverify.runtime.rank import RankServer

        keep_freed_memory()
        self._server: Any = RankServer(rank, own_gpu() if device == "cuda" else device, nccl, timeout_s)

    def run(self, endpoint: str, spin_s: float) -> None:
        """Serve the driver that listens at `endpoint`."""
        from tpverify.runtime.transport import serve

        serve(endpoint, spin_s, self._server.answer)

    def idle(self) -> None:
        """Stand in for `run` where no socket is served."""
        threading.Event().wait()

    def answer(self, message: list[bytes]) -> list[bytes]:
        """One message as a Ray call."""
        return [bytes(frame) for frame in self._server.answer([memoryview(frame) for frame in message])]

    def ping(self) -> int:
        """Process id. In a concurrency group of its own, so it answers while a step runs."""
        return os.getpid()


# Sent whole rather than as a name to import. A runtime_env would do as well, at twice the time to start eight ranks.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
