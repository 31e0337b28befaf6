"""The verify kernel on this GPU: times, rates, share of the floor, and each peer beside it in the same run.

    python bench/bench_verify.py [--json]

us is main + combine in one graph replay: the median of runs with random slots, L2 filled with other data by reading it.
main and combine are what CUPTI gives each kernel. Ours takes a random tree and so does SGLang's extend, the others a
chain. x is a peer's time over ours, "-" where it does not take the shape. Progress is on stderr.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import roofline
import torch
from peers import PEERS, Peer, Unsupported
from verify_case import LATENT, ROW, SCALE, SHAPES, Shape, VerifyCase

from tpverify.config import MlaGeometry
from tpverify.ending import ended
from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.attention import VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan

LADDER = {"cuda_naive": "naive", "cuda_fp32": "flash_fp32"}  # backend: part of the kernel's name
LADDER_SHAPES = (Shape(4096, 8), Shape(32_768, 8))
# Goals in us, shape by shape: what must be reached on an H200, and what would be more.
BARS = (
    *(11.5, 13.5, 17, 21, 27), *(25, 31, 40, 60, 102), *(72, 84, 140, 255, 500),
    *(42, 60, 108), *(112, 200), *(60, 290, 560),
)  # fmt: skip
STRETCH = (
    *(10, 12, 13, 15, 20), *(22, 25, 30, 48, 86), *(66, 72, 118, 215, 420),
    *(36, 50, 88), *(None, None), *(None, None, None),
)  # fmt: skip
GOALS = {shape.name: goals for shape, goals in zip(SHAPES, zip(BARS, STRETCH, strict=True), strict=True)}
MANY = Shape(8192, 16, batch=64)  # for the planner's time
MOVE = 61, 4096, 65_536  # layers, rows to move, slots of the pool
KERNELS = ("flash_verify", "combine_kernel")
PARTS = ("main_us", "combine_us")  # their times
Timer = Callable[[Callable[[], object]], float]


def prepare(case: VerifyCase, requests: Sequence[VerifyRequest]) -> tuple[Callable[[], None], torch.Tensor, VerifyPlan]:
    """Our run, where it writes, and its plan."""
    shape = case.shape
    tokens = shape.batch * shape.prefix
    plan = VerifyPlan(MlaGeometry(shape.heads), shape.batch, shape.nodes, tokens, case.device, exact=shape.exact)
    plan.update(requests)
    out = case.q.new_empty(*case.q.shape[:2], LATENT)
    lse = torch.empty(case.q.shape[:2], device=case.device)
    return lambda: plan.run(case.q, case.pool, out, lse, SCALE), out, plan


def measure(
    case: VerifyCase, peers: Sequence[Peer], time: Timer, capture: Callable, kernels: Callable
) -> dict[str, Any]:
    """A row. time(run): us; capture(run): its graph, and whether it has one; kernels(run, names): us of each kernel."""
    shape = case.shape
    run, out, _ = prepare(case, case.trees)
    ours, _ = capture(run)
    run()
    times = [time(ours)]
    found = {}
    for peer in peers:
        found[peer.name] = one = beside(case, peer, time, capture)
        if "us" in one:
            times.append(time(ours))
    us = statistics.median(times)
    for one in found.values():
        if "us" in one:
            one["x"] = round(one["us"] / us, 3)
    parts = kernels(run, KERNELS)
    return {
        "shape": shape.name, "batch": shape.batch, "prefix": shape.prefix, "nodes": shape.nodes, "heads": shape.heads,
        "us": round(us, 2), "main_us": parts.get(KERNELS[0]), "combine_us": parts.get(KERNELS[1]),
        "gb_s": round(shape.bytes / us / 1e3, 1), "tflop_s": round(shape.flop / us / 1e6, 2),
        "error": case.error(out, tree=True), "peers": found,
    }  # fmt: skip


def beside(case: VerifyCase, peer: Peer, time: Timer, capture: Callable) -> dict[str, Any]:
    """A peer's time and its error, or why there is none."""
    try:
        run = peer.prepare(case)
        error = case.error(run(), peer.tree)
        timed, graph = capture(run)
        return {"us": round(time(timed), 2), "error": error, "graph": graph}
    except Unsupported:
        return {"not_run": "does not take this shape"}
    except Exception as failure:  # a peer's failure is a finding, not ours
        return {"not_run": f"{type(failure).__name__}: {failure}"[:200]}


def ladder(case: VerifyCase, kernels: Callable) -> list[dict[str, Any]]:
    """The float32 kernels below the flash kernel, by CUPTI, on the same values."""
    rows: list[dict[str, Any]] = []
    for backend, name in LADDER.items():
        row: dict[str, Any] = {"shape": case.shape.name, "kernel": name}
        run = functools.partial(
            verify_attention, case.q.float(), case.pool.float(), case.trees, softmax_scale=SCALE, backend=backend
        )
        try:
            row |= {"error": case.error(run()[0], tree=True), "us": sum(kernels(run, (name,)).values())}
        except ArgumentError as refusal:
            row |= {"not_run": str(refusal)}
        rows.append(row)
    return rows


def move(time: Timer) -> dict[str, float]:
    """Random rows of all layers to random slots, without and with hashes, beside a plain copy of as many bytes."""
    layers, count, slots = MOVE
    pool = torch.zeros(layers, slots, ROW, dtype=torch.bfloat16, device="cuda")
    src, dst = torch.randperm(slots, device="cuda").int()[: 2 * count].view(2, count)
    hashes = torch.empty(layers, count, dtype=torch.int64, device="cuda")
    plain = torch.zeros(2, layers * count * ROW, dtype=torch.bfloat16, device="cuda")
    found = {
        "us": time(lambda: cuda.move_rows(pool, src, dst, None)),
        "hashed_us": time(lambda: cuda.move_rows(pool, src, dst, hashes)),
        "copy_us": time(lambda: plain[1].copy_(plain[0])),
    }
    return {name: round(us, 2) for name, us in found.items()} | {"gb_s": round(plain.nbytes / found["us"] / 1e3, 1)}


def results(progress: Callable[[str], None]) -> dict[str, Any]:
    """All that this bench measures on the GPU."""
    from gpu_time import GpuTimer, captured, header

    time, before = GpuTimer(), header()
    versions = {peer.name: peer.version() for peer in PEERS}
    there = [peer for peer in PEERS if versions[peer.name]]
    rows = []
    for i, shape in enumerate(SHAPES):
        progress(f"{i + 1}/{len(SHAPES)} {shape.name}")
        rows.append(measure(VerifyCase(shape, "cuda"), there, time, captured, time.kernels))
    gpu = roofline.of(before["name"])
    for row, shape in zip(rows, SHAPES, strict=True):
        floor = gpu.floor_us(shape) if gpu else None
        row["floor_us"], row["of_floor"] = floor and round(floor, 2), floor and round(floor / row["us"], 3)
    progress("ladder and planner")
    case = VerifyCase(MANY, "cuda")
    plan = prepare(case, case.trees)[2]
    planned = time.kernels(lambda: plan.update(case.trees), ("plan_kernel",))
    return {
        "gpu": before | {"after": header(), "read_gb_s": round(time.read_gb_s(), 1)},
        "peers": versions,
        "rows": rows,
        "ladder": [row for shape in LADDER_SHAPES for row in ladder(VerifyCase(shape, "cuda"), time.kernels)],
        "plan_us": planned.get("plan_kernel"),
        "move": move(time),
    }


def table(found: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    peers = [name for name, version in found["peers"].items() if version]
    rows = [
        {
            "shape": row["shape"], "us": f"{row['us']:.1f}",
            **dict(zip(("bar", "stretch"), GOALS.get(row["shape"], (None, None)), strict=True)),
            "main + combine": " + ".join(f"{row[part]:.1f}" if row[part] else "?" for part in PARTS),
            "GB/s": f"{row['gb_s']:.0f}", "TFLOP/s": f"{row['tflop_s']:.0f}",
            "% of floor": row["of_floor"] and f"{100 * row['of_floor']:.0f}",
            **{f"x {name}": f"{one['x']:.2f}" if "x" in (one := row["peers"][name]) else None for name in peers},
        }
        for row in found["rows"]
    ]  # fmt: skip
    gpu = {key: value for key, value in found["gpu"].items() if key != "after"}
    lines = [", ".join(f"{key} {value}" for key, value in gpu.items())]
    lines += [f"peer: {name} {version or 'is not installed'}" for name, version in found["peers"].items()]
    worst = max(row["error"] for row in found["rows"])
    lines += ["", *roofline.table(rows), "", f"largest relative error against float64: {worst:.1e}"]
    for row in found["ladder"]:
        said = row.get("not_run") or f"{row['us']:.1f} us, error {row['error']:.1e}"
        lines.append(f"ladder: {row['kernel']}, {row['shape']}: {said}")
    lines.append(f"plan of {MANY.batch} requests: {found['plan_us'] or float('nan'):.1f} us")
    one, (layers, count, _) = found["move"], MOVE
    share = 100 * one["copy_us"] / one["us"]
    moved = (
        f"{one['us']:.0f} us, {one['gb_s']:.0f} GB/s, {share:.0f} % of a copy; with hashes {one['hashed_us']:.0f} us"
    )
    return [*lines, f"move of {count:,} random rows x {layers} layers: {moved}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if reason := cuda.why_not():
        print(json.dumps({"not_measured": reason}) if args.json else f"not measured: {reason}")
        return
    found = results(lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(found, indent=2) if args.json else "\n".join(table(found)))


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
