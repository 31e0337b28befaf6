"""Times of the KV bookkeeping on one core, and how long the runs of slots stay.

python bench/bench_kv.py [--slots 200000] [--json]
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tpverify.ending import ended
from tpverify.kv.log import Entry, KvLog, Replica
from tpverify.kv.slots import FreeSlots

REPEATS = 7
NODES = 33  # of a tree, the root included
ACCEPTED = [0, 2, 9]


def microseconds(run: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    """Mean time of run(x) over the inputs."""
    start = time.perf_counter()
    for x in inputs:
        run(x)
    return (time.perf_counter() - start) / len(inputs) * 1e6


def free_list(num_slots: int, n: int, fill: float) -> dict[str, float]:
    """Amortised us of n slots given and taken, sorting included; a share `fill` of a shuffled pool is out."""
    times: dict[str, list[float]] = {"give": [], "take_recent": [], "take_run": []}
    for repeat in range(REPEATS):
        for kind in ("take_recent", "take_run"):
            free = FreeSlots(num_slots)
            order = np.random.default_rng(repeat).permutation(free.take_run(free.count))
            out = int(num_slots * fill) // n * n
            held = deque(order[:out].reshape(-1, n))
            free.give(order[out:])
            take = getattr(free, kind)
            given = [held.popleft() for _ in range(min(100, len(held)))]
            times["give"].append(microseconds(free.give, given))

            def turn(_: object, free: FreeSlots = free, held: deque = held, take: Callable = take) -> None:
                free.give(held.popleft())
                held.append(take(n))

            held.extend(take(n) for _ in given)
            times[kind].append(microseconds(turn, range(max(200, 2 * num_slots // n))) - times["give"][-1])
    return {f"{name} {n}, {fill:.0%} full": statistics.median(values) for name, values in times.items()}


class LogTimes:
    """us a call with half the pool live in 64 sequences: on the coordinator, and of the same entries on a replica."""

    def __init__(self, num_slots: int) -> None:
        self.times: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            self.log, self.replica = KvLog(num_slots), Replica(num_slots)
            self.measure(self.log, num_slots)

    def timed(self, name: str, run: Callable, inputs: Sequence) -> None:
        self.times.setdefault(name, []).append(microseconds(run, inputs))
        first, entries = self.log.pending()
        if entries:
            entries = msgspec.msgpack.decode(msgspec.msgpack.encode(entries), type=list[Entry])
            start = time.perf_counter()
            self.replica.apply(first, entries)
            each = (time.perf_counter() - start) / len(entries) * 1e6
            self.times.setdefault(name + ", replica", []).append(each)
        assert self.replica.digest() == self.log.digest()

    def measure(self, log: KvLog, num_slots: int) -> None:
        seqs = [log.open() for _ in range(64)]
        for seq in seqs:
            log.append(seq, num_slots // 2 // len(seqs))
        self.replica.apply(*log.pending())
        for _ in range(10):
            self.timed("append 1", lambda seq: log.append(seq, 1), seqs)
            self.timed(f"draft {NODES}", lambda seq: log.draft(seq, NODES), seqs)
            self.timed(f"commit {len(ACCEPTED)} of {NODES}", lambda seq: log.commit(seq, ACCEPTED), seqs)
        self.timed("digest", lambda _: log.digest(), range(100))
        self.timed("stats", lambda _: log.stats(), range(100))
        many, parent = num_slots // 4, log.open()
        self.timed(f"append {many}", lambda seq: log.append(seq, many), [parent])
        self.timed(f"fork of {many}", log.fork, [parent])
        self.timed(f"close of {many}, shared", log.close, [parent])
        self.timed(f"close of {many}", log.close, [parent + 1])

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.times.items()}


def mean_runs(num_slots: int, steps: int = 1500) -> tuple[float, float]:
    """Mean ascending run of prompts and of decoded rows: 32 sequences come and go, up to 3 drafted nodes accepted."""
    rng, log = random.Random(0), KvLog(num_slots)
    prompt, goal, seqs = {}, {}, []

    def start() -> int:
        seq = log.open()
        prompt[seq] = log.append(seq, rng.randint(num_slots // 1000, num_slots // 70)).size
        goal[seq] = prompt[seq] + rng.randint(num_slots // 2000, num_slots // 70)
        return seq

    seqs = [start() for _ in range(32)]
    for _ in range(steps):
        for i, seq in enumerate(seqs):
            log.draft(seq, NODES)
            log.commit(seq, [0, *sorted(rng.sample(range(1, 12), rng.randint(0, 3)))])
            if log.length(seq) > goal[seq]:
                log.close(seq)
                seqs[i] = start()
        log.pending()

    def mean(tables: list[np.ndarray]) -> float:
        return sum(t.size for t in tables) / sum(1 + int(np.count_nonzero(np.diff(t) != 1)) for t in tables)

    prompts = [log.prefix_slots(seq)[: prompt[seq]] for seq in seqs]
    return mean(prompts), mean([log.prefix_slots(seq)[prompt[seq] :] for seq in seqs if log.length(seq) > prompt[seq]])


def scattered(num_slots: int, load: float) -> KvLog:
    """32 sequences that have decoded, 3 scattered nodes of 64 a step, until a share `load` of the pool is live."""
    rng, log = random.Random(0), KvLog(num_slots)
    seqs = [log.open() for _ in range(32)]
    while log.stats()["live"] < load * num_slots:
        for seq in seqs * 32:
            log.draft(seq, 64)
            log.commit(seq, [0, *sorted(rng.sample(range(1, 64), 2))])
        for seq in seqs:  # drops the tree: its slots return in another order than they were taken
            log.append(seq, 1)
    log.pending()
    return log


def defrag(num_slots: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    """us of planning and of the first wave, and for two budgets what it takes until nothing moves any more."""
    times, rows = {}, []
    for load, most in ((0.7, num_slots), (0.7, 4096), (0.95, num_slots)):
        log = scattered(num_slots, load)
        live, pinned = log.stats()["live"], np.zeros(num_slots, np.bool_)
        before = max(log.extents().values())
        name = f"{load:.0%} live, {most} rows a wave"
        for goal in (1, 4):
            plans = [microseconds(lambda _: log._plan(pinned, goal, goal, most), [0]) for _ in range(REPEATS)]  # noqa: B023
            times[f"plan, goal {goal}, {name}"] = statistics.median(plans)
        moves, calls = 0, []
        while True:
            start = time.perf_counter()
            moved = log.defrag(most)
            calls.append((time.perf_counter() - start) * 1e6)
            log.pending()
            log.acknowledge()
            if moved.done:
                break
            moves += moved.moves
        times[f"first call, {name}"], times[f"mean call, {name}"] = calls[0], statistics.mean(calls)
        after = max(log.extents().values())
        rows.append(
            {
                "load": load,
                "wave": most,
                "moves_a_row": moves / live,
                "calls": len(calls),
                "before": before,
                "after": after,
            }
        )
    return times, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=200_000)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    rows: dict[str, float] = {}
    for fill in (0.5, 0.98):
        for n in (1, NODES, 129, 1024):
            rows |= free_list(args.slots, n, fill)
    rows |= LogTimes(args.slots).medians()
    times, defrags = defrag(args.slots)
    rows |= times
    prompts, decoded = mean_runs(args.slots)
    if args.json:
        runs = {"prompts": prompts, "decoded": decoded}
        print(json.dumps({"slots": args.slots, "microseconds": rows, "defrag": defrags, "mean_run": runs}))
        return
    print(f"{args.slots} slots, microseconds a call, median of {REPEATS}")
    for name, value in rows.items():
        print(f"{name:44} {value:10.2f}")
    for row in defrags:
        print(
            f"defrag, {row['load']:.0%} live, at most {row['wave']} rows a wave: {row['moves_a_row']:.2f} moves a row"
            f" in {row['calls']} calls; extents of the worst sequence {row['before']} -> {row['after']}"
        )
    print(f"mean run of slots: prompts {prompts:.1f}, decoded {decoded:.2f}")


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
