"""A worker's memory goes when the worker does: the next one on its rank is built in its place."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Ranks

from tpverify import native
from tpverify.runtime.comm import SocketComm
from tpverify.runtime.decoder_worker import DecoderWorker
from tpverify.runtime.setup import EngineSetup
from tpverify.tree import DraftTree


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_no_cycle_holds_the_pool(tmp_path: Path, host_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, with a drafter and a recorded step."""
    monkeypatch.setattr(native, "host", lambda: host_library)
    checkpoint = EngineSetup("tiny", 1, device="cpu", num_slots=64, max_batch=1, prefill_chunk=8).directory
    options = {"checkpoint": str(checkpoint), "num_slots": 64, "max_batch": 1, "drafter": True}
    worker = DecoderWorker(SocketComm(str(tmp_path / "meet"), 0, 1, 5.0), "cpu", options)
    assert worker.steps is not None
    for _ in range(2):
        worker.steps([DraftTree.chain([5, 6])], [torch.empty(0, dtype=torch.int64)], [torch.tensor([3, 9])])
    pool, context = weakref.ref(worker.pool), weakref.ref(worker.context)
    del worker
    assert pool() is None and context() is None


@pytest.mark.usefixtures("no_collector")
def test_nor_that_of_a_gpu_rank() -> None:
    """Whose stages are run by what would be graphs on a GPU."""
    ranks = Ranks(num_slots=128, max_batch=1)
    assert len(ranks.generate([b"def "], max_new_tokens=4)[0].tokens) == 4
    kept = weakref.ref(ranks.workers[0].kept)
    pool = weakref.ref(ranks.workers[0].kept.pool)
    ranks.workers.clear()
    assert pool() is None and kept() is None
