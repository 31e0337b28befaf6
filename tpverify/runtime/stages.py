"""Where a rank's step spends its time: by the clock on a CPU, by events in the stream on a GPU."""

import time
from itertools import pairwise
from typing import Any

import torch


class StageClock:
    """On a GPU a stage lasts until everything enqueued up to its mark has run; nothing waits for that."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stages: list[str] = []  # of a step, after a name for its start
        self._moments: list[Any] = []  # the start and the end of each; on a GPU events, recorded anew in every step

    def start(self) -> None:
        """A new step begins: the stages of the last one are forgotten."""
        self._stages = [""]
        self._now(0)

    def mark(self, stage: str) -> None:
        """What came since the mark before was `stage`."""
        self._now(len(self._stages))
        self._stages.append(stage)

    def seconds(self) -> dict[str, float]:
        """By stage, in order. On a GPU the stream must have been waited for."""
        found: dict[str, float] = {}
        for stage, (begin, end) in zip(self._stages[1:], pairwise(self._moments), strict=False):
            lasted = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            found[stage] = found.get(stage, 0.0) + lasted
        return found

    def _now(self, index: int) -> None:
        if index == len(self._moments):
            self._moments.append(torch.cuda.Event(enable_timing=True) if self._on_gpu else 0.0)
        if self._on_gpu:
            self._moments[index].record()
        else:
            self._moments[index] = time.perf_counter()
