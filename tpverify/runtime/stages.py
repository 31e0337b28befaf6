"""Where a rank's step spends its time: by the clock on a CPU, by events in the stream on a GPU."""

import time
from typing import Any

import torch


class StageClock:
    """On a GPU a stage lasts until everything enqueued up to its mark has run; nothing waits for that."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """A new step begins: the stages of the last one are forgotten."""
        self._marks = [("", self._now())]

    def mark(self, stage: str) -> None:
        """What came since the mark before was `stage`."""
        self._marks.append((stage, self._now()))

    def seconds(self) -> dict[str, float]:
        """By stage, in order. On a GPU the stream must have been waited for."""
        found: dict[str, float] = {}
        for (_, begin), (stage, end) in zip(self._marks, self._marks[1:], strict=False):
            lasted = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            found[stage] = found.get(stage, 0.0) + lasted
        return found

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
