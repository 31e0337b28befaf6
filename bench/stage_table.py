"""Times of a step on the driver's clock, the stages that rank 0 reports, and how both are printed."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

WARM_UP = 20
STAGES = ("plan", "upload", "attention", "gather", "accept", "reply")  # columns that every table has


def measured(step: Callable[[], dict[str, float]], steps: int) -> dict[str, Any]:
    """p50 and p99 of `steps` calls in ms, and medians of the stages in us. step() returns its stages in seconds; what
    they leave of the wall time is "reply": messages both ways, their queues, and the driver's own work."""
    for _ in range(WARM_UP):
        step()
    walls, stages = [], []
    for _ in range(steps):
        start = time.perf_counter()
        seconds = step()
        walls.append(time.perf_counter() - start)
        stages.append(seconds | {"reply": walls[-1] - sum(seconds.values())})
    return {
        "p50_ms": round(1e3 * float(np.median(walls)), 3),
        "p99_ms": round(1e3 * float(np.percentile(walls, 99)), 3),
        "stages_us": {name: round(1e6 * float(np.median([one[name] for one in stages])), 1) for name in stages[0]},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row's p50, p99 and stages; stages that are no column of the table follow by name."""
    lines = [
        "| step | ranks | p50 ms | p99 ms | " + " | ".join(f"{stage} us" for stage in STAGES) + " | other us |",
        "|---|" + "---|" * (4 + len(STAGES)),
    ]
    for row in rows:
        stages = row.get("stages_us", {})
        cells = [row["row"], f"{row['ranks']} {row['device']}", f"{row['p50_ms']:.3f}", f"{row['p99_ms']:.3f}"]
        cells += [f"{stages[stage]:.0f}" if stage in stages else "-" for stage in STAGES]
        cells.append(", ".join(f"{name} {us:.0f}" for name, us in stages.items() if name not in STAGES) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines
