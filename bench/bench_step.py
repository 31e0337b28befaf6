"""What a step costs beside its arithmetic: an empty step by transport, and a verify step of one small tree.

    python bench/bench_step.py [--ranks 8] [--steps 1000] [--json]

An empty step is a Ping through the coordinator: no log entry, every rank's digest compared.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import Ping
from tpverify.runtime.ranks import TRANSPORTS, RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.draft_tree import DraftTree

WARM_UP = 50
PREFIX, NODES, HEADS = 1024, 33, 64


def percentiles(step: Callable[[], object], steps: int) -> dict[str, float]:
    """p50 and p99 in milliseconds over `steps` calls."""
    for _ in range(WARM_UP):
        step()
    milliseconds = np.empty(steps)
    for i in range(steps):
        start = time.perf_counter()
        step()
        milliseconds[i] = 1e3 * (time.perf_counter() - start)
    return {
        "p50_ms": round(float(np.median(milliseconds)), 3),
        "p99_ms": round(float(np.percentile(milliseconds, 99)), 3),
    }


def empty_step(ranks: int, transport: str, steps: int) -> dict[str, object]:
    start = time.perf_counter()
    group = RankGroup(ranks, "cpu", transport=transport)
    started = time.perf_counter() - start
    coordinator = Coordinator(group, "tables", {}, num_slots=PREFIX)
    row = {"row": f"empty step, {transport}", "ranks": ranks, **percentiles(lambda: coordinator.step(Ping()), steps)}
    start = time.perf_counter()
    group.close()
    return row | {"start_s": round(started, 2), "close_s": round(time.perf_counter() - start, 2)}


def verify_step(ranks: int, steps: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    tree = DraftTree.from_parents(np.arange(NODES), np.arange(-1, NODES - 1) // 2)  # binary
    draft = Draft(
        tree, torch.randn(NODES, HEADS, 576, generator=generator), torch.randn(NODES, 576, generator=generator)
    )
    cfg = RuntimeConfig(tp=ranks, device="cpu", geometry=MlaGeometry(num_heads=HEADS), num_slots=2 * PREFIX)
    with VerifyRuntime(cfg) as runtime:
        seq = runtime.open()
        runtime.append(seq, torch.randn(PREFIX, 576, generator=generator))
        times = percentiles(lambda: runtime.verify({seq: draft}, softmax_scale=0.1), steps)
        rank_ms = round(1e3 * runtime.stats()["last_verify_seconds"]["total"], 3)
    name = f"verify step, {NODES} nodes, {HEADS} heads, {PREFIX} committed"
    return {"row": name, "ranks": ranks, **times, "of_which_rank_0_ms": rank_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [empty_step(args.ranks, transport, args.steps) for transport in TRANSPORTS]
    rows.append(verify_step(args.ranks, max(10, args.steps // 20)))
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(" | ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
