"""GPU ranks that are lost: communicators end with the graphs that hold them, and are made anew, the new rank in them.

Ranks are threads that take a CPU for a GPU, and NCCL is a stand-in with its habits: scripted_nccl.py. On GPUs:
tests/multi_gpu/test_gpu_recovery.py.
"""

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from decoding import held_out
from scripted_nccl import Recorder, Scripted, init, unique_id
from test_recovery import STEPS, Story, config, loses_two, told, whole
from thread_ranks import ThreadRanks, watched  # noqa: F401

from tpverify import pynccl
from tpverify.errors import RankFailure
from tpverify.runtime import comm, engine, graphs, ranks, recovery
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.runtime import VerifyRuntime

pytestmark = pytest.mark.usefixtures("watched")
OPTIONS = {"max_new_tokens": 12, "budget": 6}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No collector: what a worker leaves behind has to go by itself."""
    monkeypatch.setattr(comm, "LOOK_S", 0.02)
    monkeypatch.setattr(ranks, "LOST_S", 1.0)
    monkeypatch.setattr(recovery, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(pynccl, "unique_id", unique_id)
    monkeypatch.setattr(pynccl, "init", init)
    monkeypatch.setattr(graphs, "Recorder", Recorder)
    monkeypatch.setattr(engine, "for_decoder", lambda *_: ("cuda", ""))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    return told(0, STEPS)


def group(size: int, nccl: bool = True, deadline_s: float = 1.0) -> ThreadRanks:
    Scripted.everything.clear()
    return ThreadRanks(size, deadline_s, "cpu:0", nccl)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fate", ["kill", "hang"])
@pytest.mark.parametrize(("place", "after"), [("nccl", 4), ("entries", 9), ("hashes", 0)])
def test_attention_ranks_by_nccl(undisturbed: list[torch.Tensor], place: str, after: int, fate: str, rank: int) -> None:
    found = group(4, deadline_s=0.5)
    story = Story(VerifyRuntime(config(4), group=found, max_restarts=1))
    found.lose(rank, place, fate, after)
    story.tell(STEPS)
    story.runtime.check_content()
    assert not found.fates and found.started == 5
    whole(story, undisturbed)


@pytest.mark.parametrize("rank", [0, 1])
def test_attention_ranks_that_share_a_gpu(undisturbed: list[torch.Tensor], rank: int) -> None:
    found = group(2, nccl=False)
    story = Story(VerifyRuntime(config(2), group=found, max_restarts=1))
    found.lose(rank, "gather", after=2)
    story.tell(STEPS)
    assert not found.fates and found.started == 3
    whole(story, undisturbed)


SECOND = [(place, again) for place in ("meeting", "nccl", "hashes") for again in (0, 1, 3)]


@pytest.mark.parametrize(("place", "again"), [*SECOND, ("send", 0), ("recv", 1)])
def test_another_lost_while_one_is_replaced(
    undisturbed: list[torch.Tensor], place: str, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source, the new one, or one that stands by."""
    monkeypatch.setattr(recovery, "START_DEADLINE_S", 1.0)
    loses_two(group(4, deadline_s=0.5), ("entries", 6), place, again, undisturbed)


def generate(ranks: ThreadRanks, max_restarts: int = 1) -> tuple[list[GenerationResult], Engine]:
    ranks.device = "cuda"
    engine = Engine("tiny", 2, group=ranks, num_slots=256, max_batch=2, prefill_chunk=24, max_restarts=max_restarts)
    return engine.generate(held_out(40)[:2], **OPTIONS), engine


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "for_decoder", lambda *_: ("cuda", ""))
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        with ThreadRanks(2, 30.0, "cpu:0", False) as ranks:
            return [result.tokens for result in generate(ranks)[0]]


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "shared"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_model_decodes_on(tokens: list[list[int]], rank: int, nccl: bool) -> None:
    """Old graphs go with their worker, or their communicator could not end."""
    with group(2, nccl, deadline_s=30.0) as ranks:
        ranks.lose(rank, "nccl" if nccl else "entries", after=25 if nccl else 6)
        results, decoder = generate(ranks)
        assert [result.tokens for result in results] == tokens
        assert not ranks.fates and [list(one["ranks"]) for one in decoder.stats()["recoveries"]] == [[rank]]
        assert decoder._coordinator.check_content() >= 0
        if nccl:
            ended = [one for one in Scripted.everything if one.failure is not None and one.rank != rank]
            assert ended and all(one.destroyed and not one.graphs for one in ended)
            assert sum(one.failure is None and bool(one.graphs) for one in Scripted.everything) == 2


def test_runtimes_of_other_sizes_on_the_same_ranks(undisturbed: list[torch.Tensor]) -> None:
    """Every rank forgets every communicator that has lost a rank, whichever runtime made it and whichever lost it."""
    with group(4) as found:
        Story(VerifyRuntime(config(4), group=found)).verify([0])
        small = Story(VerifyRuntime(config(2), group=found, max_restarts=2))
        found._actors[3].die()  # which the small runtime has no use for
        found.lose(1, "nccl", "hang", after=4)
        small.tell(STEPS)
        assert found.started == 6
        assert all(torch.equal(*pair) for pair in zip(small.outputs, undisturbed, strict=True))
        Story(VerifyRuntime(config(2), group=found)).verify([0])
        large = Story(VerifyRuntime(config(4), group=found))
        large.tell(STEPS)
        whole(large, undisturbed)


def test_an_error_without_a_loss_is_named_by_who_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others only say that they were left."""
    found = group(2)
    story = Story(VerifyRuntime(config(2), group=found, max_restarts=1))
    right = Scripted.allgather

    def wrong(comm: Scripted, x: torch.Tensor, out: torch.Tensor) -> None:
        if comm.rank == 1:
            comm.failure = "NCCL on rank 1: SystemError"
        right(comm, x, out)

    monkeypatch.setattr(Scripted, "allgather", wrong)
    with pytest.raises(RankFailure, match="^rank 1 failed at step .*: ConnectionError: .*NCCL on rank 1: SystemError$"):
        story.tell(STEPS)
    assert found.started == 2 and found.closed
