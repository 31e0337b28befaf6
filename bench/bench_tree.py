"""Time of one draft tree: `build_ddtree_topk` with K = budget at depth 15, to positions, links and ancestor words.

    python bench/bench_tree.py [--json] [--vocab 151936] [--rounds 5] [--budgets 16 64 256 512 1023]

The native library and its Python twin run on the same inputs in the same process, alternating by round; a row gives the
best round's median (p50_us), its 99th percentile and the median over all rounds. "flat" draws normal logits, which
makes wide trees; "peaked" draws steeper ones, which makes deep trees.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tpverify import native
from tpverify.ending import ended
from tpverify.tree import DraftTree, build_ddtree_topk

DEPTH = 15
GOALS_US = {64: 40.0, 512: 300.0}
STEEPNESS = {"flat": 1.0, "peaked": 6.0}


def top_k(vocab: int, k: int, steepness: float) -> tuple[np.ndarray, np.ndarray]:
    """float32 [DEPTH, k] full-vocabulary log-probabilities, descending, and their int64 ids."""
    logits = steepness * np.random.default_rng(0).standard_normal((DEPTH, vocab))
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k].copy()
    return np.take_along_axis(logprobs, ids, axis=1), ids


def build(logprobs: np.ndarray, ids: np.ndarray, budget: int) -> DraftTree:
    tree = build_ddtree_topk(logprobs, ids, root_token=1, budget=budget)
    tree.positions(4096)
    tree.ancestor_words()
    return tree


def times_us(logprobs: np.ndarray, ids: np.ndarray, budget: int, seconds: float) -> np.ndarray:
    """Wall time of each call for about `seconds`, the garbage collector held off as timeit does."""
    for _ in range(3):
        build(logprobs, ids, budget)
    clock = time.perf_counter
    samples: list[float] = []
    end = clock() + seconds
    gc.disable()
    try:
        while len(samples) < 20 or clock() < end:
            start = clock()
            build(logprobs, ids, budget)
            samples.append(clock() - start)
    finally:
        gc.enable()
    return np.array(samples) * 1e6


def no_library() -> None:
    """In the place of `native.host`: the twin runs."""


def rows(vocab: int, budgets: list[int], rounds: int, seconds: float) -> Iterator[dict[str, object]]:
    find_host = native.host
    backends = {"native": find_host, "twin": no_library} if find_host() else {"twin": no_library}
    try:
        for shape, steepness in STEEPNESS.items():
            for budget in budgets:
                inputs = top_k(vocab, budget, steepness)
                samples: dict[str, list[np.ndarray]] = {name: [] for name in backends}
                for _ in range(rounds):
                    for name, host in backends.items():
                        native.host = host
                        samples[name].append(times_us(*inputs, budget, seconds))
                tree = build(*inputs, budget)
                for name in backends:
                    best = min(samples[name], key=np.median)
                    yield {
                        "shape": shape,
                        "budget": budget,
                        "backend": name,
                        "nodes": len(tree),
                        "depth": int(tree.depths.max()),
                        "p50_us": round(float(np.median(best)), 1),
                        "p99_us": round(float(np.percentile(best, 99)), 1),
                        "p50_all_rounds_us": round(float(np.median(np.concatenate(samples[name]))), 1),
                        "goal_us": GOALS_US.get(budget) if name == "native" else None,
                    }
    finally:
        native.host = find_host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 256, 512, 1023])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="per backend and round")
    options = parser.parse_args()
    results = rows(options.vocab, options.budgets, options.rounds, options.seconds)
    if options.json:
        record = {
            "bench": "tree",
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "python": platform.python_version(),
            "numpy": np.__version__,
            "build": native.build_info(),
            "vocab": options.vocab,
            "draft_depth": DEPTH,
            "rows": list(results),
        }
        print(json.dumps(record, indent=1))
        return
    print(f"depth {DEPTH}, vocab {options.vocab}, K = budget; host library: {native.host_status()}")
    print(
        f"{'shape':>7} {'budget':>6} {'backend':>7} {'nodes':>5} {'depth':>5} {'p50 us':>9} {'p99 us':>9} {'goal':>5}"
    )
    for row in results:
        goal = "" if row["goal_us"] is None else f"{row['goal_us']:.0f}"
        print(
            f"{row['shape']:>7} {row['budget']:>6} {row['backend']:>7} {row['nodes']:>5} {row['depth']:>5} "
            f"{row['p50_us']:>9} {row['p99_us']:>9} {goal:>5}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
