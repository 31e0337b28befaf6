"""Defrag that nobody asked for: between steps, within its share of their time, and without changing a bit."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from decoding import held_out, same

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import PoolFull
from tpverify.kv.pacer import Pacer
from tpverify.runtime import coordinator
from tpverify.runtime.engine import Engine
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.accept import Accept
from tpverify.tree.draft_tree import DraftTree

pytestmark = pytest.mark.ray
CFG = RuntimeConfig(tp=2, device="cpu", geometry=MlaGeometry(num_heads=8), num_layers=2, num_slots=128, max_batch=4)
PATH = Accept(np.array([0, 2], np.int32), 0)


class Eager(Pacer):
    """Always allows it, and notes what it cost."""

    def __init__(self) -> None:
        super().__init__(share=1e12, first_cost_s=0.0)
        self.runs: list[tuple[float, int, bool]] = []

    def ran(self, seconds: float, moves: int, done: bool) -> None:
        self.runs.append((seconds, moves, done))
        super().ran(seconds, moves, done)


@pytest.fixture(scope="module")
def group(ray_session: None) -> Iterator[RankGroup]:
    with RankGroup(2, "cpu", deadline_s=60) as group:
        yield group


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Until it is called nothing moves; from then on every coordinator moves whatever it can after every step."""

    def switch() -> None:
        monkeypatch.setattr(coordinator, "Pacer", Eager)
        monkeypatch.setattr(coordinator, "SCATTERED", 1)

    return switch


@pytest.mark.parametrize(("strategy", "temperature"), [("ddtree", 0.0), ("chain", 0.8), ("autoregressive", 0.0)])
def test_generation_is_the_same_with_moves_after_every_step(
    group: RankGroup, always: Callable[[], None], strategy: str, temperature: float
) -> None:
    prompts = [*held_out(60)[:3], held_out(90)[0]]
    options = {"max_new_tokens": 20, "strategy": strategy, "temperature": temperature, "budget": 16}
    plain = Engine("tiny", tp=2, group=group, prefix_cache=False)
    expected = plain.generate(prompts, **options)
    assert plain.stats()["moves"] == 0
    always()
    engine = Engine("tiny", tp=2, group=group, prefill_chunk=25)
    for turn in range(2):
        results = engine.generate(prompts, **options)
        assert all(map(same, results, expected))
        assert all(a.accept_lengths == b.accept_lengths for a, b in zip(results, expected, strict=True))
        assert all((result.stats["cached_tokens"] > 0) == bool(turn) for result in results)
    assert engine.stats()["moves"] > 100
    pacer = engine._coordinator.pacer
    assert isinstance(pacer, Eager)
    assert 0 <= engine.stats()["moves"] - sum(moves for _, moves, _ in pacer.runs) <= engine.stats()["quarantined"]
    assert all(seconds > 0 for seconds, _, _ in pacer.runs), "plans and copies are counted"


def test_a_small_pool_with_moves_after_every_step(group: RankGroup, always: Callable[[], None]) -> None:
    """Slots in quarantine are waited for: no step lacks any, and no prompt is refused for them."""
    prompts = [bytes([65 + i]) * 60 for i in range(6)]
    options = {"max_new_tokens": 16, "budget": 8}
    expected = Engine("tiny", tp=1, group=group, prefix_cache=False).generate(prompts, **options)
    always()
    engine = Engine("tiny", tp=1, group=group, num_slots=205)
    for _ in range(2):
        assert all(map(same, engine.generate(prompts, **options), expected))
    stats = engine.stats()
    assert stats["moves"] > 0 and stats["free"] + stats["evictable"] + stats["quarantined"] == 204


def rows(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def session(group: RankGroup) -> tuple[list[bytes], dict[str, int]]:
    """What a life of appends, steps, commits and closes puts out."""
    rng, outs = np.random.default_rng(4), []
    tree = DraftTree.from_parents(np.arange(4), [-1, 0, 0, 1])
    with VerifyRuntime(CFG, group=group) as runtime:
        seqs = [runtime.open() for _ in range(3)]
        for _ in range(8):
            for seq in seqs:
                runtime.append(seq, rows(rng, 2, 2, 576))
            drafts = {seq: Draft(tree, rows(rng, 2, 4, 8, 576), rows(rng, 2, 4, 576)) for seq in seqs}
            for verified in runtime.verify(drafts, softmax_scale=0.07).values():
                outs += [verified.out.numpy().tobytes(), verified.lse.numpy().tobytes()]
            runtime.commit(seqs[0], PATH)
        outs += [digest.encode() for seq in seqs for digest in runtime.content_digest(seq).values()]
        left = 127 - sum(runtime.length(seq) for seq in seqs) - len(tree)
        runtime.append(seqs[1], rows(rng, 2, left, 576))  # to the last slot, quarantined or not
        with pytest.raises(PoolFull):
            runtime.append(seqs[2], rows(rng, 2, len(tree) + 1, 576))
        assert len(set(runtime.digests().values())) == 1
        return outs, runtime.stats()


def test_outputs_are_the_same_with_moves_after_every_step(group: RankGroup, always: Callable[[], None]) -> None:
    expected, stats = session(group)
    assert stats["moves"] == 0
    always()
    outs, stats = session(group)
    assert outs == expected and stats["moves"] > 30


def test_what_is_not_scattered_stays(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much time there is: sequences of fewer extents than the threshold, as most are."""
    monkeypatch.setattr(coordinator, "Pacer", Eager)
    engine = Engine("tiny", tp=1, group=group)
    engine.generate(held_out(60)[:2], max_new_tokens=12)
    assert engine.stats()["moves"] == 0 and engine._coordinator.pacer.runs  # type: ignore[attr-defined]
