"""The step bench without GPUs: what it computes of times, how it prints them, and that its trees are trees."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import stack_step  # noqa: E402
import stage_table  # noqa: E402

from tpverify.kv.log import KvLog  # noqa: E402
from tpverify.kv.pacer import Pacer  # noqa: E402
from tpverify.runtime.messages import Decode  # noqa: E402
from tpverify.tree import DraftTree  # noqa: E402


def test_what_the_stages_leave_is_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1, 2, ... ms, of which half is attention."""
    durations = [1.0] * stage_table.WARM_UP + [1e-3 * (i + 1) for i in range(101)]
    clock, called = iter([t for d in durations[stage_table.WARM_UP :] for t in (0.0, d)]), iter(durations)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = stage_table.measured(lambda: {"attention": next(called) / 2}, 101)
    assert found == {"p50_ms": 51.0, "p99_ms": 100.0, "stages_us": {"attention": 25500.0, "reply": 25500.0}}


def test_the_table_has_every_stage_and_names_the_others() -> None:
    rows = [
        {"row": "empty", "ranks": 2, "device": "cuda", "p50_ms": 0.1064, "p99_ms": 0.2, "stages_us": {"reply": 106.4}},
        {"row": "deep", "ranks": 8, "device": "cpu", "p50_ms": 12.5, "p99_ms": 20.0,
         "stages_us": {"plan": 80.2, "gather": 610.0, "attention": 9000.0, "gemm": 2000.0, "head": 50.0}},
    ]  # fmt: skip
    head, rule, empty, deep = stage_table.table(rows)
    assert head == (
        "| step | ranks | p50 ms | p99 ms | plan us | upload us | attention us | gather us | accept us | reply us | other us |"  # noqa: E501
    )
    assert rule.count("|") == head.count("|") == empty.count("|") == deep.count("|")
    assert empty == "| empty | 2 cuda | 0.106 | 0.200 | - | - | - | - | - | 106 | - |"
    assert deep == "| deep | 8 cpu | 12.500 | 20.000 | 80 | - | 9000 | 610 | - | - | gemm 2000, head 50 |"


def test_shares_of_the_deep_step() -> None:
    """The first products are 2,050 - 2,000 us, the head's 60 - 20: what they take beyond a step without products. By
    itself the gather takes longer than it adds: what it does not add is no part of the step. What products, kernel and
    gather take longer together than one by one is theirs."""
    layers = {"step": 12000.0, "all": 11960.0, "gemm": 3000.0, "attention": 8000.0, "gather": 900.0}
    head = {"step": 60.0, "all": 59.0, "gemm": 61.0, "attention": 20.0, "gather": 21.0, "all but gather": 62.0}
    layers["three"], layers["all but gather"], head["three"] = 11700.0, 11460.0, 60.0
    plan = {"step": 190.0, "gemm": 2050.0}
    found = {
        name: {
            "p50_ms": 12.5,
            "p99_ms": 13.0,
            "stages_us": {"plan": plan.get(name, 2000.0), "layers": us, "head": head[name], "reply": 200.0},
        }
        for name, us in layers.items()
    }
    row = stack_step.row(found, 2)
    assert row["stages_us"] == {
        "gemm": 3090.0, "attention": 8000.0, "gather": 500.0, "between the three": 200.0, "rest of the layers": 300.0,
        "plan": 140.0, "head": 20.0, "reply": 200.0,
    }  # fmt: skip
    assert row["other_share"] == pytest.approx(1 - 11790 / 12500)
    assert row["other_share_alone"] == pytest.approx(1 - 11590 / 12500)
    assert (row["p50_ms"], row["p99_ms"]) == (12.5, 13.0)
    assert row["gather"] == {"in_step_us": 500.0, "alone_us": 900.0, "layers": 61, "bytes_a_rank": 32 * 32 * 128 * 2}


def test_nothing_moves_by_itself_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that lack a part compute rows that differ, and those are compared when they move."""

    class Still:
        def __init__(self, group: None, kind: str, options: dict, *, num_slots: int) -> None:
            self.log, self.pacer, self.steps = KvLog(num_slots, 1), Pacer(), 0

        def step(self, work: Decode) -> list[SimpleNamespace]:
            self.pacer.step(1e3)
            assert not self.pacer.due()
            self.steps += 1
            path = np.zeros(1, "<i4").tobytes()
            return [SimpleNamespace(result=lambda: ([(path, 0)], {"layers": 0.0}))]

    monkeypatch.setattr(stack_step, "Coordinator", Still)
    assert stack_step.run(None, ("gather",), 20)["p50_ms"] > 0  # type: ignore[arg-type]


def test_its_trees_are_trees() -> None:
    parents = set()
    for step in (0, 1, 5000):
        request = stack_step.drafted(7, step)
        tree = DraftTree.from_parents(np.frombuffer(request.tokens, "<i8"), np.frombuffer(request.parents, "<i4"))
        assert len(tree) == 32 and tree.tokens.max() < stack_step.KIMI_K2.vocab_size and request.seq == 7
        parents.add(request.parents)
    assert len(parents) == 3, "no two steps alike"
