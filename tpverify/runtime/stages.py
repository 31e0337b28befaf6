"""Where a rank's step spends its time: by the clock on a CPU, by events in the stream on a GPU."""

import time
from collections.abc import Sequence
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
            found[stage] = found.get(stage, 0.0) + _between(begin, end, self._on_gpu)
        return found

    def _now(self, index: int) -> None:
        if index == len(self._moments):
            self._moments.append(torch.cuda.Event(enable_timing=True) if self._on_gpu else 0.0)
        if self._on_gpu:
            self._moments[index].record()
        else:
            self._moments[index] = time.perf_counter()


class GraphClock:
    """The same where CUDA graphs record the moments as they run, which costs a step's host nothing. `start` and `mark`
    belong into their bodies."""

    def __init__(self, device: torch.device, *stages: str) -> None:
        """stages: in the order in which they end."""
        self._on_gpu = device.type == "cuda"
        self._moments: dict[str, Any] = dict.fromkeys(("", *stages), 0.0)
        if self._on_gpu:
            self._moments = {name: torch.cuda.Event(enable_timing=True, external=True) for name in self._moments}

    def start(self) -> None:
        self.mark("")

    def mark(self, stage: str) -> None:
        """The end of `stage`."""
        if self._on_gpu:
            self._moments[stage].record()
        else:
            self._moments[stage] = time.perf_counter()

    def seconds(self, stages: Sequence[str] | None = None) -> dict[str, float]:
        """Of these, the first ones, by default of all. On a GPU the graphs must have been waited for."""
        stages = list(self._moments)[1:] if stages is None else stages
        moments = pairwise(self._moments[name] for name in ("", *stages))
        return dict(zip(stages, (_between(*two, self._on_gpu) for two in moments), strict=True))


def _between(begin: Any, end: Any, on_gpu: bool) -> float:
    """Seconds."""
    return begin.elapsed_time(end) / 1e3 if on_gpu else end - begin
