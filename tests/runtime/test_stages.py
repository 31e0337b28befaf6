"""Seconds by stage: of the clock, and of events where a GPU is."""

import time

import pytest
import torch

from tpverify.runtime.stages import GraphClock, StageClock


def test_stages_of_a_step_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.0, 12.25, 100.0, 101.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = StageClock(torch.device("cpu"))
    clock.start()
    for stage in ("plan", "attention", "plan"):
        clock.mark(stage)
    assert clock.seconds() == {"plan": 0.75, "attention": 1.5}
    clock.start()
    clock.mark("gather")
    assert clock.seconds() == {"gather": 1.0}, "of the step before nothing is left"


class Event:
    """Events that are reached 5 ms apart."""

    count = 0

    def __init__(self, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing
        self.external = external

    def record(self) -> None:
        Event.count += 1
        self.at = 5.0 * Event.count

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_stages_of_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StageClock(torch.device("cuda", 3))
    clock.start()
    clock.mark("layers")
    clock.mark("head")
    assert clock.seconds() == {"layers": 0.005, "head": 0.005}


def test_moments_that_graphs_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order their bodies run, and however often. Only an external event is recorded by a replay."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = GraphClock(torch.device("cuda", 0), "plan", "layers")
    for stage in ("layers", "plan"):
        clock.mark(stage)
    clock.start()
    clock.mark("plan")
    clock.mark("layers")
    assert clock.seconds() == {"plan": 0.005, "layers": 0.005}
    assert all(event.external for event in clock._moments.values())


def test_moments_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = GraphClock(torch.device("cpu"), "plan", "layers")
    clock.start()
    clock.mark("plan")
    clock.mark("layers")
    assert clock.seconds() == {"plan": 0.5, "layers": 1.5}
    assert clock.seconds(["plan"]) == {"plan": 0.5}, "of a step that ended there"
