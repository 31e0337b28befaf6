"""Seconds by stage: of the clock, and of events where a GPU is."""

import time

import pytest
import torch

from tpverify.runtime.stages import StageClock


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

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

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
