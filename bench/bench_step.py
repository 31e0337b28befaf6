"""What a step costs beside its arithmetic, stage by stage: an empty one, a verify step, and on GPUs a deep model's.

    python bench/bench_step.py [--device auto] [--ranks N] [--steps 1000] [--json]

An empty step is a Ping through the coordinator: no log entry, every rank's digest compared. Without --ranks it is eight
CPU ranks, or a rank for each of at most eight GPUs. On GPUs a graph of 61 gathers is what NCCL takes for them.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stack_step import stack_step
from stage_table import measured, table

from tpverify.config import DEVICES, MlaGeometry, RuntimeConfig
from tpverify.ending import ended
from tpverify.runtime import cluster
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import Ping
from tpverify.runtime.ranks import TRANSPORTS, RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.draft_tree import DraftTree

HEADS = 64
VERIFY = {"cpu": ((33, 1024),), "cuda": ((33, 1024), (32, 32768))}  # nodes, committed
MOST_RANKS = 8


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start(ranks: int, device: str, transport: str) -> tuple[RankGroup, float]:
    begin = time.perf_counter()
    group = RankGroup(ranks, device, transport=transport)
    return group, round(time.perf_counter() - begin, 2)


def empty_step(group: RankGroup, steps: int) -> dict[str, Any]:
    coordinator = Coordinator(group, "tables", {}, num_slots=1024)

    def step() -> dict[str, float]:
        coordinator.step(Ping())
        return {}

    return {"ranks": group.size, "device": group.device, **measured(step, steps)}


def verify_step(group: RankGroup, nodes: int, committed: int, steps: int) -> dict[str, Any]:
    """Queries, latents and results travel: what those pay who bring their own queries."""
    dtype = torch.bfloat16 if group.device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tree = DraftTree.from_parents(np.arange(nodes), np.arange(-1, nodes - 1) // 2)  # binary
    draft = Draft(tree, normal(nodes, HEADS, 576), normal(nodes, 576))
    cfg = RuntimeConfig(
        tp=group.size, device=group.device, geometry=MlaGeometry(HEADS), num_slots=2 * committed,
        dtype=str(dtype).removeprefix("torch."), max_batch=1,
    )  # fmt: skip
    with VerifyRuntime(cfg, group=group) as runtime:
        seq = runtime.open()
        runtime.append(seq, normal(committed, 576))

        def step() -> dict[str, float]:
            runtime.verify({seq: draft}, softmax_scale=0.04)
            seconds = runtime.stats()["last_verify_seconds"]
            return {name: value for name, value in seconds.items() if name != "total"}

        found = measured(step, steps)
    row = f"verify, 1 layer, {HEADS} heads, {nodes} nodes, {committed} committed"
    return {"row": row, "ranks": group.size, "device": group.device, **found}


def rows_of(ranks: int, device: str, steps: int) -> list[dict[str, Any]]:
    rows = []
    for transport in TRANSPORTS:
        say(f"empty step, {transport}")
        group, started = start(ranks, device, transport)
        with group:
            row = {"row": f"empty, {transport}", **empty_step(group, steps)}
            if transport == "socket":
                few = max(10, steps // 20)
                rows += [verify_step(group, *shape, few) for shape in VERIFY[group.device]]
                if group.device == "cuda":
                    rows.append({"device": "cuda", **stack_step(group, few, say)})
                row["collectives"] = group.collectives
            begin = time.perf_counter()
            group.close()
        rows.append(row | {"start_s": started, "close_s": round(time.perf_counter() - begin, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with cluster.session():
        gpus = 0 if args.device == "cpu" else cluster.this_node().gpus
        ranks = args.ranks if args.ranks is not None else min(gpus, MOST_RANKS) or MOST_RANKS
        rows = rows_of(ranks, args.device, args.steps)
    name = torch.cuda.get_device_name() if rows[0]["device"] == "cuda" else None
    if args.json:
        print(json.dumps({"gpu": name, "torch": torch.__version__, "rows": rows}, indent=2))
        return
    print(*table(rows), sep="\n")
    for row in rows:
        for key in ("start_s", "close_s", "other_share", "other_share_alone", "gather", "collectives"):
            if key in row:
                print(f"{row['row']}: {key} {row[key]}")


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
