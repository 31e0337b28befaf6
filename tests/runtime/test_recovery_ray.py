"""Ranks that die or hang under an engine, on real processes: not a token is lost or changed.

The tokens and hidden states to compare with are those of plain decoding, undisturbed. Every fault that a process can
meet elsewhere, and those of rows: test_recovery.py.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from armed import arm, armed_rank
from decoding import held_out
from test_ranks import process_ended, released

from tpverify.errors import RankFailure
from tpverify.runtime import ranks
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.ranks import RankGroup

pytestmark = pytest.mark.ray
TP, DEADLINE_S = 4, 5.0
PROMPTS = held_out(150)[:3]  # three chunks of a prompt each
OPTIONS = {"max_new_tokens": 32, "seed": 7, "budget": 16}


@pytest.fixture(scope="module")
def faults(ray_session: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def group(faults: Path) -> Iterator[RankGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "Rank", armed_rank(faults))
        with RankGroup(TP, "cpu", deadline_s=DEADLINE_S) as group:
            yield group


@pytest.fixture(scope="module")
def engine(group: RankGroup) -> Engine:
    return Engine("tiny", tp=TP, group=group, prefill_chunk=64, num_slots=1024, max_restarts=1000)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[float, list[GenerationResult]]:
    return {
        temperature: engine.generate(PROMPTS, strategy="autoregressive", temperature=temperature, **OPTIONS)
        for temperature in (0.0, 1.0)
    }


def check(results: list[GenerationResult], expected: list[GenerationResult]) -> None:
    for result, undisturbed in zip(results, expected, strict=True):
        assert result.tokens == undisturbed.tokens
        assert result.stats["hidden_digest"] == undisturbed.stats["hidden_digest"]


@pytest.mark.parametrize(
    ("place", "rank", "fate", "after", "strategy", "temperature"),
    [
        ("entries", 2, "SIGKILL", 5, "ddtree", 0.0),
        ("collective", 1, "SIGKILL", 2, "ddtree", 1.0),  # in the prompts' first chunk
        ("collective", 3, "SIGKILL", 45, "autoregressive", 1.0),
        ("accept", 0, "SIGKILL", 13, "chain", 1.0),  # all ranks but this one have done their part
        ("collective", 0, "SIGKILL", 31, "ddtree", 0.0),
        ("collective", 0, "SIGSTOP", 90, "chain", 0.0),
    ],
)
def test_rank_lost_in_a_step(
    engine: Engine,
    plain: dict[float, list[GenerationResult]],
    faults: Path,
    place: str,
    rank: int,
    fate: str,
    after: int,
    strategy: str,
    temperature: float,
) -> None:
    before = len(engine.stats()["recoveries"])
    engine._coordinator._log.make_room(900)  # nothing is cached: prompts take all their steps
    arm(faults, rank, place, fate, after)
    check(engine.generate(PROMPTS, strategy=strategy, temperature=temperature, **OPTIONS), plain[temperature])
    (recovered,) = engine.stats()["recoveries"][before:]
    assert list(recovered["ranks"]) == [rank] and recovered["source"] == (0 if rank else 1)
    assert ("hangs" if fate == "SIGSTOP" else "its process is gone") in recovered["ranks"][rank]
    assert recovered["rows"] > 0
    assert set(recovered["seconds"]) == {"detect", "end", "start", "join", "refill", "check", "rerun"}
    assert engine._coordinator.check_content() > 0


def test_rank_lost_between_steps_with_a_cached_prefix(
    engine: Engine, plain: dict[float, list[GenerationResult]]
) -> None:
    """Rows that only the cache has come over too: what is read of them afterwards is the same."""
    first = engine.generate(PROMPTS, **OPTIONS)
    steps = engine.stream(PROMPTS[0], **OPTIONS)
    next(steps)
    os.kill(engine._group.pids[0], signal.SIGKILL)
    *_, result = steps
    assert isinstance(result, GenerationResult) and result.stats["cached_tokens"] == len(PROMPTS[0]) - 1
    check([result], plain[0.0][:1])
    again = engine.generate(PROMPTS, **OPTIONS)
    assert all(r.stats["cached_tokens"] == len(prompt) - 1 for r, prompt in zip(again, PROMPTS, strict=True))
    check(again, plain[0.0])
    assert [r.accept_lengths for r in again] == [r.accept_lengths for r in first], "the drafter has its context again"


@pytest.mark.parametrize(
    ("place", "rank"),
    [("weights", 1), ("refill", 0)],
    ids=["the new rank, loading", "the source"],
)
def test_a_second_rank_lost_while_the_first_is_replaced(
    engine: Engine, plain: dict[float, list[GenerationResult]], faults: Path, place: str, rank: int
) -> None:
    arm(faults, 1, "collective", after=20)
    arm(faults, rank, place)
    check(engine.generate(PROMPTS, temperature=1.0, **OPTIONS), plain[1.0])
    assert set(engine.stats()["recoveries"][-1]["ranks"]) == {1, rank}
    assert not list(faults.iterdir()) and engine._coordinator.check_content() > 0


def test_no_rank_left_is_one_error(ray_session: None) -> None:
    with released():
        engine = Engine("tiny", tp=2, device="cpu", deadline_s=20)
        pids = list(engine._group.pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match="^rank . failed at step 2: its process is gone.* no rank is left"):
            engine.generate(b"def ", max_new_tokens=4)
        assert all(map(process_ended, pids)) and engine._group.closed
