"""Ranks in whose way a fault can be put while they run: a file says which rank meets what, where, and when."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray

from tpverify.runtime.actor import Rank

PLACES = {
    "entries": "tpverify.kv.replica:Replica.apply",
    "collective": "tpverify.runtime.comm:_receive",
    "gather": "tpverify.runtime.comm:SocketComm.gather",
    "accept": "tpverify.runtime.decoder_worker:DecoderWorker._accept",
    "move": "tpverify.runtime.moves:Kept.move",
    "refill": "tpverify.runtime.moves:Kept.refill",
    "meeting": "tpverify.runtime.comm:SocketComm.connect",
    "weights": "tpverify.runtime.decoder_worker:load_checkpoint",
}


def arm(directory: Path, rank: int, place: str, fate: str = "SIGKILL", after: int = 0) -> None:
    """The rank meets the signal at the place, once, when it has passed there `after` times."""
    (directory / f"{place}-{rank}").write_text(f"{fate} {after}")


def armed_rank(directory: Path) -> type:
    """A Rank that looks for its fate in the directory."""

    def meet(path: Path) -> None:
        if path.exists():
            fate, after = path.read_text().split()
            if int(after):
                path.write_text(f"{fate} {int(after) - 1}")
            else:
                path.unlink()
                os.kill(os.getpid(), signal.Signals[fate])
                time.sleep(5)  # which takes this thread a moment

    class ArmedRank(Rank):
        def __init__(self, root: str, rank: int, *arguments: Any) -> None:
            super().__init__(root, rank, *arguments)
            for place, target in PLACES.items():
                module, _, path = target.partition(":")
                owner: Any = importlib.import_module(module)
                *outer, name = path.split(".")
                for part in outer:
                    owner = getattr(owner, part)
                setattr(owner, name, self._watched(getattr(owner, name), directory / f"{place}-{rank}"))

        @staticmethod
        def _watched(inner: Any, fate: Path) -> Any:
            def watched(*arguments: Any, **options: Any) -> Any:
                meet(fate)
                return inner(*arguments, **options)

            return watched

    return ArmedRank


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have the tests on their path
